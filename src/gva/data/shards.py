"""Token shards on disk: flat memory-mapped tokens, document ends beside them, checksums and provenance.

    preparation.json           what the folder is prepared from, and how; written first
    tokenizer/                 loads with AutoTokenizer
    train-00000.tokens         uint16 or uint32, one document after another, each closed by the end token
    train-00000.documents      int64, where each document ends
    train-00000.json           the shard's record: counts, checksums, where it came from
    index.json                 the dataset: splits, shards, tokenizer, provenance, sums of the other files; written last

A folder without index.json is an unfinished preparation, whose whole shards are kept when it goes on. The index is
taken away before anything that it describes is replaced.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from gva.data.documents import DataError
from gva.run.atomic import replacing, write_atomically
from gva.run.files import FolderError, inside, read_object

INDEX = "index.json"
PREPARATION = "preparation.json"
FORMAT = 1
DTYPES = ("uint16", "uint32")
REMEDY = "prepare it again, by the command that made it: what is whole is kept"


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


class ShardWriter:
    """Takes a shard's documents as they come, in pieces; nothing has the shard's name until all are there."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.folder, self.name, self.dtype = folder, name, np.dtype(dtype)
        self.tokens = self.bytes = 0
        self._ends = array("q")
        self._sum = hashlib.sha256()
        self._written = ExitStack()

    def __enter__(self) -> "ShardWriter":
        self._file = self._written.enter_context(replacing(self.folder / f"{self.name}.tokens"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._written.__exit__(*error)

    def write(self, ids: Sequence[int] | np.ndarray, size: int = 0) -> None:
        """More tokens of a document, which stand for `size` bytes of text."""
        content = np.asarray(ids, self.dtype).tobytes()
        self._file.write(content)
        self._sum.update(content)
        self.tokens += len(ids)
        self.bytes += size

    def end_document(self) -> None:
        self._ends.append(self.tokens)

    def record(self, source: dict[str, Any]) -> Shard:
        """Once the tokens are in place: the ends of documents, and the record that makes the shard count."""
        ends = np.array(self._ends, np.int64).tobytes()
        write_atomically(self.folder / f"{self.name}.documents", ends)
        self._sum.update(ends)
        counts = (self.tokens, len(self._ends), self.bytes)
        shard = Shard(self.name, *counts, self.dtype.name, self._sum.hexdigest(), source)
        write_atomically(self.folder / f"{self.name}.json", json.dumps(asdict(shard), indent=2))
        return shard


def write_shard(folder: Path, name: str, documents: list[np.ndarray], size: int, source: dict[str, Any]) -> Shard:
    """A shard of documents at hand, which stand for `size` bytes of text."""
    with ShardWriter(folder, name, documents[0].dtype) as writer:
        for document in documents:
            writer.write(document)
            writer.end_document()
    writer.bytes = size
    return writer.record(source)


def as_shard(record: Any, place: Path) -> Shard:
    """A shard's record, if it is one."""
    kinds = {field.name: get_origin(field.type) or field.type for field in fields(Shard)}
    fine = isinstance(record, dict) and all(type(record.get(name)) is kind for name, kind in kinds.items())
    if not fine or record.keys() != kinds.keys() or record["dtype"] not in DTYPES:
        raise FolderError(f"{place}: has a damaged record of a shard; {REMEDY}")
    inside(place.parent, record["name"], place)
    return Shard(**record)


def read_record(folder: Path, name: str) -> Shard | None:
    """The record of a finished shard, or None where there is none that can be read."""
    path = folder / f"{name}.json"
    with suppress(FolderError):
        return as_shard(read_object(path, REMEDY), path) if path.is_file() else None
    return None


def is_intact(folder: Path, shard: Shard) -> bool:
    """Whether the bytes on disk are those that the record stands for."""
    paths = [folder / f"{shard.name}.{suffix}" for suffix in ("tokens", "documents")]
    if not all(path.is_file() for path in paths):
        return False
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(2**20):
                found.update(piece)
    return found.hexdigest() == shard.sha256


def read_index(folder: Path) -> dict[str, Any]:
    """What a prepared folder says of itself."""
    path = folder / INDEX
    if (folder / PREPARATION).is_file() and not path.is_file():
        raise DataError(f"{folder}: its preparation has not ended (no {INDEX}); run the command again that began it")
    if not path.is_file():
        raise DataError(f"{folder}: no {INDEX}; make the dataset with: gva data prepare --out {folder}")
    index = read_object(path, REMEDY)
    if index.get("format") != FORMAT:
        raise DataError(f"{path}: format {index.get('format')!r}, this version reads {FORMAT}")
    if not isinstance(index.get("splits"), dict) or not isinstance(index.get("vocab_size"), int):
        raise DataError(f"{path}: without splits or vocab_size; {REMEDY}")
    told = index.get("sha256")  # what an earlier version prepared has none
    if told is not None and told != sum_of_index(index):
        raise DataError(f"{path}: differs from what was written; {REMEDY}")
    return index


def sum_of_index(index: dict[str, Any]) -> str:
    rest = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


class TokenDataset:
    """One split of a prepared folder, as one long run of tokens."""

    def __init__(self, folder: str | os.PathLike, split: str = "train") -> None:
        self.folder, self.split = Path(folder), split
        self.index = read_index(self.folder)
        if split not in self.index["splits"]:
            raise DataError(f"{self.folder}: no split {split!r}, only {sorted(self.index['splits'])}")
        self.shards = [as_shard(record, self.folder / INDEX) for record in self.index["splits"][split]]
        self._tokens = [self._map(shard, "tokens", shard.tokens, shard.dtype) for shard in self.shards]
        self._ends = [self._map(shard, "documents", shard.documents, "int64") for shard in self.shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])

    def _map(self, shard: Shard, suffix: str, count: int, dtype: str) -> np.ndarray:
        path = self.folder / f"{shard.name}.{suffix}"
        expected = count * np.dtype(dtype).itemsize
        if not path.is_file():
            raise DataError(f"{path}: missing; {REMEDY}")
        if path.stat().st_size != expected:
            raise DataError(f"{path}: {path.stat().st_size} bytes where the index says {expected}; {REMEDY}")
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
        for shard in self.shards:
            if not is_intact(self.folder, shard):
                raise DataError(f"{self.folder / shard.name}: checksum differs from the index; {REMEDY}")
