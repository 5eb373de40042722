"""Associative recall: keys, each with its value, then all keys again in another order, to be answered by their values.

    k3 v8  k1 v5  |  k1 k3   ->   v5 v8

What a cache forgets shows here, where prose hardly asks for it. On disk lie the task and a tokenizer: sequences are
made from the seed and the step. Training begins with few pairs and takes twice as many once those are answered, the
smaller numbers staying in the mix; how far it is, is part of a run's state.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import gva
from gva.data.batches import IGNORED, Batches
from gva.data.documents import DataError
from gva.data.shards import INDEX, PREPARATION
from gva.data.tokenizer import TextTokenizer
from gva.errors import check
from gva.run.atomic import write_atomically
from gva.run.files import read_object

FORMAT = "recall"
FEWEST = 2  # pairs, at first
BEYOND = 4  # times as many pairs as are trained are tested
MASTERED = 0.9  # the share of right answers that calls for twice as many pairs
ANSWERS = 2048  # of a test
MOST = 2**20  # keys and values

TASK = ("keys", "values", "pairs", "every")
TOKENIZER = "tokenizer"
REMEDY = "make it again, with gva data recall: remove this folder first"

TRAIN, VALID, TEST = range(3)  # what random numbers are for


def write_recall(out: Path, keys: int = 4096, values: int = 4096, pairs: int = 64, every: int = 50) -> dict[str, Any]:
    """A folder to train on: up to `pairs` pairs, tested every so many steps. Returns its index."""
    task = {"keys": keys, "values": values, "pairs": pairs, "every": every}
    index, tokenizer = _made(task)
    held = out / INDEX
    if (out / PREPARATION).is_file() or (held.is_file() and read_object(held, "remove it") != index):
        raise DataError(f"{out}: holds other data; give another folder, or remove this one")
    tokenizer.save(out / TOKENIZER)
    write_atomically(out / INDEX, json.dumps(index, indent=2))
    return index


def _made(task: dict[str, int]) -> tuple[dict[str, Any], TextTokenizer]:
    """What a folder of this task holds."""
    keys, values, pairs, every = (task[name] for name in TASK)
    check(pairs >= FEWEST and pairs & (pairs - 1) == 0, "pairs", pairs, f"must be a power of two, {FEWEST} or more")
    most = 2 * BEYOND * pairs
    check(keys >= most, "keys", keys, f"must be {most} or more, to test {BEYOND * pairs} pairs")
    check(values > 1, "values", values, "must be 2 or more")
    check(keys + values <= MOST, "keys", keys, f"with values={values} must be {MOST:,} at most")
    check(every > 0, "every", every, "must be positive")
    names = [*(f"k{i}" for i in range(keys)), *(f"v{i}" for i in range(values))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    index = {
        "format": FORMAT,
        "vocab_size": len(names),
        "provenance": {"dataset": "associative recall", **task, "gva": gva.__version__},
        "tokens": {},
        "task": task,
    }
    return index, TextTokenizer(tokenizer, end=len(names) - 1)


def _read(folder: Path) -> tuple[dict[str, Any], TextTokenizer]:
    """The index of a folder, if it is what its task makes, and the tokenizer that belongs to it."""
    path = folder / INDEX
    index = read_object(path, REMEDY)
    task = index.get("task")
    if not isinstance(task, dict) or not all(type(task.get(name)) is int for name in TASK):
        raise DataError(f"{path}: without the numbers of a task; {REMEDY}")
    try:
        made, tokenizer = _made({name: task[name] for name in TASK})
    except ValueError as error:
        raise DataError(f"{path}: {error}; {REMEDY}") from None
    noted = index.get("provenance")
    if isinstance(noted, dict) and "gva" in noted:  # another version may have made it
        made["provenance"]["gva"] = noted["gva"]
    if made != index:
        raise DataError(f"{path}: differs from what was written; {REMEDY}")
    return index, tokenizer


def verify(folder: Path) -> None:
    """Compare every file of a folder with what was written."""
    for name, content in _read(folder)[1].files().items():
        path = folder / TOKENIZER / name
        if not path.is_file() or path.read_bytes() != content.encode():
            raise DataError(f"{path}: {'differs from what was written' if path.exists() else 'missing'}; {REMEDY}")


class Recall:
    """Such a folder, in the place of a `TokenDataset`."""

    def __init__(self, folder: Path, split: str = "train") -> None:
        self.folder, self.split = folder, split
        index, tokenizer = _read(folder)
        self.index = {**index, "tokenizer": tokenizer.fingerprint}
        self.keys, self.values, self.pairs, self.every = (index["task"][name] for name in TASK)

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([self.split, self.index["task"]]).encode()).hexdigest()[:16]

    def make(self, random: np.random.Generator, counts: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        """Tokens, labels and positions [rows, 3 width]: row i is width / counts[i] samples of counts[i] pairs each."""
        keys = different(random, len(counts), width, self.keys)
        values = random.integers(self.values, size=keys.shape) + self.keys
        tokens, labels, positions = (np.empty((len(counts), 3 * width), np.int64) for _ in range(3))
        for count in np.unique(counts):
            rows = counts == count
            k, v = (x[rows].reshape(-1, width // count, count) for x in (keys, values))
            order = random.random(k.shape).argsort(-1)
            asked, answers = (np.take_along_axis(x, order, -1) for x in (k, v))
            told = np.stack((k, v), -1).reshape(*k.shape[:2], -1)
            tokens[rows] = np.concatenate((told, asked), -1).reshape(-1, 3 * width)
            labels[rows] = np.concatenate((np.full_like(told, IGNORED), answers), -1).reshape(-1, 3 * width)
            positions[rows] = np.tile(np.arange(3 * count), width // count)
        return tokens, labels, positions


class RecallBatches(Batches):
    """Fresh rows for every step, the same for every variant and rank count. Half of them have the most pairs that are
    trained by then, the others fewer."""

    dataset: Any

    def __init__(self, dataset: Recall, length: int, batch: int, seed: int, document_mask: bool = False) -> None:
        filled = 3 * dataset.pairs
        check(
            length == filled, "length", length, f"a row of up to {dataset.pairs} pairs has {filled} tokens: give that"
        )
        check(document_mask, "document_mask", document_mask, "samples lie side by side: must be true")
        check(batch > 0, "batch", batch, "must be positive")
        self.dataset, self.length, self.batch, self.seed = dataset, length, batch, seed
        self.sequences = 2**31
        training = dataset.split == "train"
        self.use = TRAIN if training else VALID
        self.pairs = torch.tensor(FEWEST if training else dataset.pairs)  # the most that are trained now
        self._made = lru_cache(maxsize=2)(self._make)

    @property
    def state(self) -> dict[str, Tensor]:
        return {"recall.pairs": self.pairs}

    def indices(self, step: int) -> list[int]:
        return list(range(step * self.batch, (step + 1) * self.batch))

    def load(self, indices: list[int]) -> dict[str, Tensor]:
        places = [divmod(index, self.batch) for index in indices]
        made = [self._made(step, int(self.pairs)) for step, _ in places]
        rows = [[part[row] for part in parts] for parts, (_, row) in zip(made, places, strict=True)]
        tokens, labels, positions = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}

    def bytes_per_token(self, sequences: int) -> float:
        """Of an answer as text."""
        return sum(len(f"v{i}") for i in range(self.dataset.values)) / self.dataset.values

    def is_tested(self, step: int) -> bool:
        return step % self.dataset.every == 0

    def tests(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The same every time: a number of pairs, and as many samples of it as have ANSWERS answers."""
        for pairs in doubling(BEYOND * self.dataset.pairs):
            random = np.random.default_rng([TEST, pairs])
            tokens, labels, _ = self.dataset.make(random, np.full(max(1, ANSWERS // pairs), pairs), pairs)
            yield pairs, {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def learned(self, accuracy: dict[int, float]) -> None:
        """Go on to twice as many pairs, if this is enough."""
        if accuracy[int(self.pairs)] > MASTERED:
            self.pairs.mul_(2).clamp_(max=self.dataset.pairs)

    def _make(self, step: int, most: int) -> tuple[np.ndarray, ...]:
        random = np.random.default_rng([self.use, self.seed, step])
        counts = random.choice(doubling(most)[:-1] or [most], self.batch)
        counts[random.random(self.batch) < 1 / 2] = most
        return self.dataset.make(random, counts, self.dataset.pairs)


def doubling(most: int) -> list[int]:
    """FEWEST, twice that and so on, up to `most`."""
    return [FEWEST << i for i in range(most.bit_length()) if FEWEST << i <= most]


def different(random: np.random.Generator, rows: int, width: int, limit: int) -> np.ndarray:
    """Numbers below `limit`, [rows, width], none twice in a row: those that are drawn again."""
    drawn = random.integers(limit, size=(rows, width))
    while True:
        order = drawn.argsort(1, kind="stable")
        ordered = np.take_along_axis(drawn, order, 1)
        row, place = np.nonzero(ordered[:, 1:] == ordered[:, :-1])
        if not len(row):
            return drawn
        drawn[row, order[row, place + 1]] = random.integers(limit, size=len(row))
