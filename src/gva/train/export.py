"""A trained model as a HuggingFace folder: weights, config and the tokenizer of its data."""

import shutil
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from gva.model import GvaForCausalLM
from gva.run.ranks import Ranks


def export_model(model: GvaForCausalLM, data: Path, out: Path, ranks: Ranks) -> None:
    """Gather the weights of all ranks and write `out`, which from_pretrained and AutoTokenizer load."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if ranks.first:
        plain = GvaForCausalLM(model.config)
        plain.load_state_dict(weights)
        plain.tie_weights()
        plain.save_pretrained(out)
        for file in (data / "tokenizer").glob("*"):
            shutil.copy(file, out / file.name)
    dist.barrier(ranks.side)
