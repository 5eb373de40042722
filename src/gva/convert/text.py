"""The text of a conversion as sequences of tokens: to calibrate on, and held out of that."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from gva.data.documents import DataError, read_documents
from gva.data.holdout import is_held_out
from gva.data.tokenizer import TextTokenizer, load_tokenizer

ONE_IN = 8  # documents are held out, chosen by their content


def read_text(paths: list[Path], held_out: list[Path], folder: Path, length: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Sequences [N, length] of about so many tokens from the start of `paths`, and a quarter as many that are held out:
    of other files, or of documents that calibration then does not see. The tokenizer is that of a model's folder."""
    tokenizer = load_tokenizer(folder)
    documents = [text for path in paths for text in read_documents(path)]
    kept = documents if held_out else [text for text in documents if not is_held_out(text, ONE_IN)]
    others = (text for path in held_out for text in read_documents(path)) if held_out else (
        text for text in documents if is_held_out(text, ONE_IN)
    )  # fmt: skip
    calibration = _packed(kept, tokenizer, length, tokens)
    if len(calibration) < 2:
        few = f"{calibration.numel()} tokens, fewer than two sequences of {length}"
        raise DataError(f"{paths[0]}: {few}, to calibrate on; give more text, or a smaller --length")
    unseen = _packed(others, tokenizer, length, tokens // 4)
    if not len(unseen):
        raise DataError(f"{paths[0]}: no sequence of {length} tokens could be held out; give some with --held-out")
    return calibration, unseen


def _packed(documents: Iterable[str], tokenizer: TextTokenizer, length: int, tokens: int) -> Tensor:
    """Documents one after another, each closed by the end token, cut into sequences."""
    held: list[int] = []
    for text in documents:
        if len(held) >= tokens:
            break
        held += tokenizer.encode([text])[0]
    whole = min(len(held), tokens) // length * length
    return torch.tensor(held[:whole], dtype=torch.long).view(-1, length)
