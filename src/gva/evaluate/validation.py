"""Validation loss of a checkpoint on a prepared folder, as a run reports it of itself."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gva.data.batches import IGNORED, Batches
from gva.data.shards import TokenDataset
from gva.data.source import is_recall
from gva.errors import check, check_finite
from gva.evaluate.scoring import BATCH_TOKENS, model_losses


@dataclass(frozen=True)
class Validation:
    """The first `sequences` (0: all) of the validation split of a prepared folder, each `length` tokens long."""

    batches: Batches
    sequences: int
    batch_tokens: int


def open_validation(
    config: Any,
    data: Path,
    length: int,
    document_mask: bool = False,
    sequences: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Validation:
    """What a model of this config will be validated on, if it can be."""
    limit = config.max_position_embeddings
    check(0 < length <= limit, "length", length, f"must lie between 1 and max_position_embeddings={limit}")
    check(sequences >= 0, "sequences", sequences, "must not be negative; 0 takes all")
    check(not is_recall(data), "data", str(data), "is associative recall, which a run measures of itself; give text")
    dataset = TokenDataset(data, "valid")
    tokens, vocabulary = dataset.vocab_size, config.vocab_size
    check(tokens <= vocabulary, "data", str(data), f"has {tokens} tokens, the model {vocabulary}")
    batches = Batches(dataset, length, 1, 0, document_mask)
    return Validation(batches, min(sequences or batches.sequences, batches.sequences), batch_tokens)


@torch.no_grad()
def validation_loss(model: Any, on: Validation, progress: bool = True) -> dict[str, Any]:
    """Nats per token and bits per byte."""
    batches, losses, chosen = on.batches, model_losses(model), list(range(on.sequences))
    rows = max(1, on.batch_tokens // batches.length)
    total, count = torch.zeros((), dtype=torch.float64, device=model.device), 0
    for start in tqdm(range(0, len(chosen), rows), desc="validation", disable=not progress):
        batch = {name: t.to(model.device) for name, t in batches.load(chosen[start : start + rows]).items()}
        total += losses(**batch).double().sum()
        count += int((batch["labels"] != IGNORED).sum())
    loss = total.item() / count
    check_finite("the validation loss is", [loss], "the model's weights are damaged, or its training diverged")
    return {
        "valid_loss": loss,
        "bits_per_byte": loss / batches.bytes_per_token(len(chosen)) / math.log(2),
        "valid_tokens": count,
        "length": batches.length,
    }
