"""Token shards on disk: flat memory-mapped tokens, document ends beside them, checksums and provenance.

    index.json                 the dataset: splits, shards, tokenizer, provenance; written last
    tokenizer/                 loads with AutoTokenizer
    train-00000.tokens         uint16 or uint32, one document after another, each closed by the end token
    train-00000.documents      int64, where each document ends
    train-00000.json           the shard's record: counts, checksums, where it came from

A folder without index.json is an unfinished preparation; its finished shards are kept when it goes on. Preparing
again takes the index away first.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gva.data.documents import DataError
from gva.run.atomic import write_atomically

INDEX = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One shard's record."""

    name: str
    tokens: int
    documents: int
    bytes: int  # of UTF-8 text, without end tokens: what bits per byte are counted over
    dtype: str
    sha256: str
    source: dict[str, Any]


def write_shard(folder: Path, name: str, documents: list[np.ndarray], size: int, source: dict[str, Any]) -> Shard:
    """Write tokens and document ends, then the record that makes them count."""
    dtype = documents[0].dtype if documents else np.dtype(np.uint16)
    tokens = np.concatenate(documents) if documents else np.empty(0, dtype)
    ends = np.cumsum([len(d) for d in documents], dtype=np.int64)
    write_atomically(folder / f"{name}.tokens", tokens.tobytes())
    write_atomically(folder / f"{name}.documents", ends.tobytes())
    digest = hashlib.sha256(tokens.tobytes() + ends.tobytes()).hexdigest()
    shard = Shard(name, len(tokens), len(ends), size, dtype.name, digest, source)
    write_atomically(folder / f"{name}.json", json.dumps(asdict(shard), indent=2))
    return shard


def read_record(folder: Path, name: str) -> Shard | None:
    """The record of a finished shard, or None."""
    path = folder / f"{name}.json"
    return Shard(**json.loads(path.read_text())) if path.is_file() else None


class TokenDataset:
    """One split of a prepared folder, as one long run of tokens."""

    def __init__(self, folder: str | os.PathLike, split: str = "train") -> None:
        self.folder, self.split = Path(folder), split
        index = self.folder / INDEX
        if not index.is_file():
            raise DataError(f"{self.folder}: no {INDEX}; make the dataset with: gva data prepare --out {self.folder}")
        self.index = json.loads(index.read_text())
        if self.index.get("format") != FORMAT:
            raise DataError(f"{index}: format {self.index.get('format')!r}, this version reads {FORMAT}")
        if split not in self.index["splits"]:
            raise DataError(f"{self.folder}: no split {split!r}, only {sorted(self.index['splits'])}")
        self.shards = [Shard(**record) for record in self.index["splits"][split]]
        self._tokens = [self._map(shard, "tokens", shard.tokens, shard.dtype) for shard in self.shards]
        self._ends = [self._map(shard, "documents", shard.documents, "int64") for shard in self.shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])

    def _map(self, shard: Shard, suffix: str, count: int, dtype: str) -> np.ndarray:
        path = self.folder / f"{shard.name}.{suffix}"
        expected = count * np.dtype(dtype).itemsize
        if not path.is_file():
            raise DataError(f"{path}: missing; prepare the dataset again (finished shards are kept)")
        if path.stat().st_size != expected:
            raise DataError(f"{path}: {path.stat().st_size} bytes where the index says {expected}; prepare it again")
        return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype)

    def __len__(self) -> int:
        """Tokens in the split."""
        return int(self._starts[-1])

    @property
    def vocab_size(self) -> int:
        return self.index["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """Changes with any token: what a resumed run compares."""
        joined = "".join(shard.sha256 for shard in self.shards)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def text_bytes(self, first: int, last: int) -> int:
        """UTF-8 bytes of the text of tokens first to last, end tokens having none."""
        from gva.data.tokenizer import load_tokenizer

        decode = load_tokenizer(self.folder / "tokenizer").tokenizer.decode
        pieces = range(first, last, 2**20)
        return sum(len(decode(self.read(i, min(i + 2**20, last)).tolist()).encode()) for i in pieces)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Where each document of the split ends, int64."""
        offsets = [ends + start for ends, start in zip(self._ends, self._starts[:-1], strict=True)]
        return np.concatenate(offsets) if offsets else np.empty(0, np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop, across shards, as int64."""
        parts = []
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for shard in range(first, len(self.shards)):
            offset = int(self._starts[shard])
            if offset >= stop:
                break
            parts.append(self._tokens[shard][max(0, start - offset) : stop - offset])
        return np.concatenate(parts).astype(np.int64)

    def verify(self) -> None:
        """Read everything and compare checksums."""
        for shard, tokens, ends in zip(self.shards, self._tokens, self._ends, strict=True):
            if hashlib.sha256(tokens.tobytes() + ends.tobytes()).hexdigest() != shard.sha256:
                raise DataError(f"{self.folder / shard.name}: checksum differs from the index; prepare it again")
