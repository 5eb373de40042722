"""A trained model as a HuggingFace folder: weights, config, the tokenizer of its data and a card."""

import copy
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from gva.data.publish import publish, publish_further
from gva.data.same import check_own
from gva.data.source import Dataset
from gva.model import GvaForCausalLM
from gva.run.files import within
from gva.run.folder import MODEL
from gva.run.ranks import Ranks
from gva.train.card import card
from gva.train.recipe import Recipe
from gva.train.trained import Given
from gva.train.zclip import total_norm


def export_model(model: GvaForCausalLM, recipe: Recipe, data: Dataset, run: Path, ranks: Ranks, given: Given) -> None:
    """Gather the weights of all ranks and write the run's model/, which from_pretrained and AutoTokenizer load. A
    checkpoint that was trained further keeps the tokenizer of its folder and what it says of generation."""
    out = within(run, MODEL)
    if not total_norm(parameter.detach() for parameter in model.parameters()).isfinite():
        raise ArithmeticError(f"{out}: not written, because weights are not numbers; train again, in another --out")
    check_own(data)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if ranks.first:
        plain = GvaForCausalLM(copy.deepcopy(model.config))  # the folder's own settings are not the run's
        plain.load_state_dict(weights)
        plain.tie_weights()
        said = card(run, model.config, recipe, data, given)
        if given.start is not None and given.start.tokenizer == given.start.place.weights:
            publish_further(plain, given.start.place.weights, out, said)
        else:
            publish(plain, data.folder / "tokenizer", out, said)
    dist.barrier(ranks.side)
