"""Batches in a seeded order. A batch is a function of the step alone, so resuming needs no position but the step."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gva.data.documents import DataError
from gva.data.shards import TokenDataset
from gva.errors import check

IGNORED = -100  # a target that counts for nothing


class Batches:
    """Sequences of `length` tokens, reshuffled each epoch by `seed`, the same for every variant and rank count."""

    def __init__(self, dataset: TokenDataset, length: int, batch: int, seed: int, document_mask: bool = False) -> None:
        check(length > 0, "length", length, "must be positive")
        check(batch > 0, "batch", batch, "must be positive")
        self.dataset, self.length, self.batch, self.seed = dataset, length, batch, seed
        self.document_mask = document_mask
        self.sequences = (len(dataset) - 1) // length
        if self.sequences < 1:
            raise DataError(
                f"{dataset.folder}: {len(dataset)} tokens in split {dataset.split!r} do not fill one sequence of "
                f"{length}; use more data or a shorter sequence"
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._bytes: dict[int, int] = {}

    def indices(self, step: int) -> list[int]:
        """Which sequences make up the global batch of a step."""
        wanted = range(step * self.batch, (step + 1) * self.batch)
        return [int(self._order(i // self.sequences)[i % self.sequences]) for i in wanted]

    def load(self, indices: list[int]) -> dict[str, Tensor]:
        """input_ids and labels [n, length] (labels already shifted), and with a document mask position_ids that
        start again at each document; the first token of a document is then no target of the one before."""
        rows = np.stack([self.dataset.read(i * self.length, (i + 1) * self.length + 1) for i in indices])
        tokens = torch.from_numpy(rows)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
        if self.document_mask:
            starts = np.stack([self._starts_of_documents(i) for i in indices])
            slots = np.arange(self.length + 1)
            begun = np.maximum.accumulate(np.where(starts, slots, 0), axis=1)
            batch["position_ids"] = torch.from_numpy((slots - begun)[:, :-1].copy())
            batch["labels"][torch.from_numpy(starts[:, 1:])] = IGNORED
        return batch

    @property
    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs of it, to be read into in place."""
        return {}

    def is_tested(self, step: int) -> bool:
        """Whether what is trained next depends on how well this step leaves the model: see `gva.data.recall`."""
        return False

    def bytes_per_token(self, sequences: int) -> float:
        """Bytes of text per target over the first sequences: what turns a loss on them into bits per byte."""
        targets = min(sequences, self.sequences) * self.length
        if targets not in self._bytes:  # the same few at every evaluation of a run
            self._bytes[targets] = self.dataset.text_bytes(1, targets + 1)
        return self._bytes[targets] / targets

    def _starts_of_documents(self, index: int) -> np.ndarray:
        """Which of the length + 1 tokens of a sequence begin a document, as booleans."""
        first, last = index * self.length, (index + 1) * self.length
        ends = self.dataset.document_ends
        found = ends[np.searchsorted(ends, first) : np.searchsorted(ends, last, side="right")] - first
        starts = np.zeros(self.length + 1, bool)
        starts[found[found <= self.length]] = True
        return starts

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.sequences)
