"""What a folder is prepared from, recorded before anything else is written: nothing else goes on in it, and what is
whole in it is kept."""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import Any

import gva
from gva.data.documents import DataError
from gva.data.shards import (
    FORMAT,
    INDEX,
    PREPARATION,
    REMEDY,
    Shard,
    TokenDataset,
    read_index,
    read_record,
    sum_of_index,
)
from gva.data.tokenizer import TextTokenizer, load_tokenizer
from gva.run.atomic import sweep, write_atomically
from gva.run.files import FolderError, inside, read_object, subfolder, within
from gva.run.folder import differences

TOKENIZER = "tokenizer"
ASKED = "requested_vocab_size"  # noted beside a tokenizer trained here
TOLD = 3  # differences that an error names


class Preparation:
    """The preparation of a folder that this process holds. `identity` are inputs and settings by their names, inputs
    with the beginnings of their sums."""

    def __init__(self, out: Path, identity: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Claim the folder, or raise DataError if it is prepared from something else."""
        self.out, self.path = out, within(out, PREPARATION)
        sweep(out)
        sweep(subfolder(out, TOKENIZER))
        record = self._read()
        changed = differences(_told_by_shards(out) if record is None else record["identity"], identity, {})
        if record is None:  # shards tell a part of it
            changed = {name: (was, now) for name, (was, now) in changed.items() if was is not None}
        if changed:
            told = [f"{name}: {was!r} -> {now!r}" for name, (was, now) in changed.items()]
            more = f" and {len(told) - TOLD} more" if len(told) > TOLD else ""
            raise DataError(
                f"{out}: is prepared from something else, which differs in {'; '.join(told[:TOLD])}{more}; "
                "give another folder, or remove this one to prepare it anew"
            )
        self.record = record or {"identity": identity, "provenance": {**provenance, "gva": gva.__version__}}
        self._write()

    def settle_tokenizer(self, given: TextTokenizer | None, train: Callable[[], TextTokenizer]) -> TextTokenizer:
        """The tokenizer of this folder: the one given, the one that was trained here, or one trained now."""
        folder = self.out / TOKENIZER
        if self.record.get("tokenizer") != sums_of(folder):
            (self.out / INDEX).unlink(missing_ok=True)
            asked = self.record["identity"]["vocab_size"]
            (given or train()).save(folder, **({ASKED: asked} if given is None else {}))
            self.record["tokenizer"] = sums_of(folder)
            self._write()
        return load_tokenizer(folder)

    def publish(self, shards: list[Shard], tokenizer: TextTokenizer) -> dict[str, Any]:
        """Write the index, unless it says the same already, and return it."""
        splits = {split: [s for s in shards if s.name.startswith(split)] for split in ("train", "valid")}
        for split, remedy in {"train": "give some", "valid": "give some more, or some with --valid"}.items():
            if not any(shard.bytes for shard in splits[split]):
                raise DataError(f"{self.out}: the inputs leave no text in split {split!r}; {remedy}")
        index = {
            "format": FORMAT,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end,
            "tokenizer": tokenizer.fingerprint,
            "provenance": self.record["provenance"],
            "tokens": {split: sum(s.tokens for s in found) for split, found in splits.items()},
            "splits": {split: [asdict(s) for s in found] for split, found in splits.items()},
            "files": {PREPARATION: sum_of(self.path), **self.record["tokenizer"]},
        }
        index["sha256"] = sum_of_index(index)
        content, path = json.dumps(index, indent=2), within(self.out, INDEX)
        if not path.is_file() or path.read_bytes() != content.encode():
            write_atomically(path, content)
        return index

    def _read(self) -> dict[str, Any] | None:
        """The record, unless there is none or it is damaged: then what is whole is found by the shards' own."""
        try:
            record = read_object(self.path, REMEDY) if self.path.is_file() else {}
        except FolderError:
            return None
        whole = all(isinstance(record.get(name), dict) for name in ("identity", "provenance"))
        return record if whole and record.get("sha256") == sum_of_index(record) else None

    def _write(self) -> None:
        self.record["sha256"] = sum_of_index(self.record)
        content = json.dumps(self.record, indent=2)
        if not self.path.is_file() or self.path.read_bytes() != content.encode():
            write_atomically(self.path, content)


def _told_by_shards(out: Path) -> dict[str, Any]:
    """What of an identity finished shards tell, where there is no record: of a folder of an earlier version, or of one
    whose record is damaged."""
    names = sorted(path.stem for path in out.glob("*-?????.json") if re.fullmatch(r"(train|valid)-\d{5}", path.stem))
    found: dict[str, Any] = {}
    with suppress(FolderError, FileNotFoundError):
        kind = read_object(out / INDEX, REMEDY).get("format")
        found |= {} if kind == FORMAT else {"format": kind}
    for shard in filter(None, (read_record(out, name) for name in names)):
        source = shard.source
        if "file" in source and (shard.name.startswith("train") or not source.get("hold_out")):
            found.setdefault("inputs", {})[shard.name] = named(source["file"], source.get("sha256", ""))
        found |= {name: source[name] for name in ("dataset", "config", "split", "field") if name in source}
    return found


def named(file: str, digest: str) -> str:
    """An input in an identity."""
    return f"{file} {digest[:16]}"


def verify(folder: Path) -> None:
    """Compare every file of a prepared folder with what was written."""
    index = read_index(folder)
    files = index.get("files")
    if not isinstance(files, dict):  # of an earlier version
        if load_tokenizer(folder / TOKENIZER).fingerprint != index.get("tokenizer"):
            raise DataError(f"{folder / TOKENIZER}: is not the tokenizer of these shards; {REMEDY}")
        files = {}
    for name, told in files.items():
        path = reduce(partial(inside, source=folder / INDEX), name.split("/"), folder)
        if not path.is_file() or sum_of(path) != told:
            raise DataError(f"{path}: {'differs from what was written' if path.exists() else 'missing'}; {REMEDY}")
    for split, records in index["splits"].items():
        TokenDataset(folder, split).verify()
        for record in records:
            shard = read_record(folder, record["name"])
            if shard is None or asdict(shard) != record:
                raise DataError(f"{folder / record['name']}.json: differs from the index; {REMEDY}")


def sums_of(folder: Path) -> dict[str, str]:
    """The sums of a folder's files that a tokenizer is read from, by their names in the folder around it."""
    return {f"{folder.name}/{path.name}": sum_of(path) for path in sorted(folder.glob("tokenizer*.json"))}


def sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
