"""A trained model as a HuggingFace folder: weights, config and the tokenizer of its data."""

from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from gva.model import GvaForCausalLM
from gva.run.atomic import write_atomically
from gva.run.ranks import Ranks
from gva.train.zclip import total_norm


def export_model(model: GvaForCausalLM, data: Path, out: Path, ranks: Ranks) -> None:
    """Gather the weights of all ranks and write `out`, which from_pretrained and AutoTokenizer load."""
    if not total_norm(parameter.detach() for parameter in model.parameters()).isfinite():
        raise ArithmeticError(f"{out}: not written, because weights are not numbers; train again, in another --out")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if ranks.first:
        plain = GvaForCausalLM(model.config)
        plain.load_state_dict(weights)
        plain.tie_weights()
        plain.save_pretrained(out)
        for file in (data / "tokenizer").glob("*"):
            write_atomically(out / file.name, file.read_bytes())
    dist.barrier(ranks.side)
