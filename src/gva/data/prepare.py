"""Documents to token shards: parallel over input files, resumable per file, the same bytes in the end."""

import hashlib
import json
import os
import platform
import sysconfig
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import gva
from gva.data.documents import DataError, kind_of, read_dataset, read_documents
from gva.data.shards import FORMAT, INDEX, Shard, read_record, write_shard
from gva.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_settings, train_bpe
from gva.run.atomic import write_atomically

HOLD_OUT = 100  # without a validation input, about one document in so many is held out, chosen by its content
ENCODE = 256  # documents per call into the tokenizer
ASKED = "requested_vocab_size"  # noted beside a tokenizer trained here
STREAM_SHARD = 50_000  # documents per shard of a streamed dataset


def prepare_files(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = 16384,
    end: str | None = None,
    field: str = "text",
    valid: list[Path] | None = None,
    hold_out: int = HOLD_OUT,
    workers: int = 1,
    progress: bool = True,
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Tokenize files into `out` and return the index. Without a tokenizer, a BPE is trained on the inputs.

    Each input becomes one shard per split. A killed run goes on where it was; a changed input or tokenizer is
    noticed by its fingerprint and done again.
    """
    if not inputs:
        raise DataError("no input files; give some, or none at all for the Python standard library")
    for path in [*inputs, *(valid or [])]:
        kind_of(path)
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    out.mkdir(parents=True, exist_ok=True)
    kept = _settle_tokenizer(out, tokenizer, vocab_size, end, lambda: _texts(inputs, field), progress)
    jobs = [(path, "train", number) for number, path in enumerate(inputs)]
    jobs += [(path, "valid", number) for number, path in enumerate(valid or [])]
    prepare = partial(_prepare_file, out, field, 0 if valid else hold_out)
    bar = tqdm(total=sum(path.stat().st_size for path, *_ in jobs), unit="B", unit_scale=True, disable=not progress)
    shards: list[Shard] = []
    with bar, _mapper(workers) as run_all:
        for (path, *_), done in zip(jobs, run_all(prepare, *zip(*jobs, strict=True)), strict=True):
            shards += done
            bar.update(path.stat().st_size)
    return _publish(out, shards, kept, provenance or {"inputs": [path.name for path in inputs]})


def prepare_dataset(
    name: str,
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = 16384,
    end: str | None = None,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    max_documents: int | None = None,
    shard_documents: int = STREAM_SHARD,
    progress: bool = True,
) -> dict[str, Any]:
    """Tokenize a HuggingFace dataset as it streams, in one process. After a kill the stream is read again, but
    shards that are already there are not tokenized again."""
    out.mkdir(parents=True, exist_ok=True)

    def stream() -> Iterator[str]:
        return islice(read_dataset(name, field, split, config), max_documents)

    kept = _settle_tokenizer(out, tokenizer, vocab_size, end, lambda: islice(stream(), 100_000), progress)
    shards: list[Shard] = []
    source, texts = {"dataset": name, "config": config, "split": split}, stream()
    with tqdm(unit=" documents", disable=not progress) as bar:
        for number, chunk in enumerate(iter(lambda: list(islice(texts, shard_documents)), [])):
            part = {"first": number * shard_documents, "documents": len(chunk), "field": field}
            shards += _write_splits(out, number, chunk, kept, {**source, **part}, "train", HOLD_OUT)
            bar.update(len(chunk))
    if not shards:
        raise DataError(f"dataset {name}: no documents in split {split!r}")
    return _publish(out, shards, kept, source)


def prepare_standard_library(out: Path, vocab_size: int = 2048, progress: bool = True) -> dict[str, Any]:
    """The embedded default: the source of the standard library of the interpreter that runs this."""
    home = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "turtledemo"}
    files = [p for p in sorted(home.rglob("*.py")) if not skipped & set(p.relative_to(home).parts)]
    joined = out / "source.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    texts = (p.read_text("utf-8", errors="ignore") for p in files)
    write_atomically(joined, "".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()))
    try:
        source = {"inputs": [f"standard library of Python {platform.python_version()}, {len(files)} files"]}
        return prepare_files([joined], out, vocab_size=vocab_size, hold_out=25, progress=progress, provenance=source)
    finally:
        joined.unlink()


def _texts(inputs: Iterable[Path], field: str) -> Iterator[str]:
    for path in inputs:
        yield from read_documents(path, field)


def _settle_tokenizer(
    out: Path, given: Path | None, vocab_size: int, end: str | None, texts: Callable[[], Iterable[str]], progress: bool
) -> TextTokenizer:
    """The tokenizer of this folder: the one given, the one an earlier run trained here, or one trained now."""
    (out / INDEX).unlink(missing_ok=True)  # what it described is about to change
    folder = out / "tokenizer"
    if given is None and tokenizer_settings(folder).get(ASKED) != vocab_size:
        train_bpe(texts(), vocab_size, progress).save(folder)
    tokenizer = load_tokenizer(given or folder, end)
    tokenizer.save(folder, **({ASKED: vocab_size} if given is None else {}))
    return tokenizer


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map` in this process, or over several that end with it."""
    if workers <= 1:
        yield map
        return
    spawn = get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=_begin_worker, initargs=(os.getpid(),)) as pool:
        yield pool.map


def _begin_worker(parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # killed without a word: an orphan must not go on writing

    threading.Thread(target=watch, daemon=True).start()


def _prepare_file(out: Path, field: str, hold_out: int, path: Path, split: str, number: int) -> list[Shard]:
    """One input file; runs in a worker process."""
    tokenizer = load_tokenizer(out / "tokenizer")
    source = {"file": path.name, "sha256": _file_digest(path), "field": field}
    return _write_splits(out, number, read_documents(path, field), tokenizer, source, split, hold_out)


def _write_splits(
    out: Path,
    number: int,
    documents: Iterable[str],
    tokenizer: TextTokenizer,
    source: dict[str, Any],
    split: str,
    hold_out: int,
) -> list[Shard]:
    """The shards of one input: its split, and with `hold_out` every so-many-th training document as validation.
    Shards that an earlier run finished from the same source are kept."""
    splits = ("train", "valid") if split == "train" and hold_out else (split,)
    source = {**source, "hold_out": hold_out, "tokenizer": tokenizer.fingerprint}
    found = [read_record(out, f"{name}-{number:05d}") for name in splits]
    if all(record is not None and record.source == source for record in found):
        return [record for record in found if record is not None]
    parts: dict[str, list[str]] = {name: [] for name in splits}
    for text in documents:
        parts["valid" if len(splits) == 2 and is_held_out(text, hold_out) else split].append(text)
    return [_write(out, f"{name}-{number:05d}", texts, tokenizer, source) for name, texts in parts.items()]


def is_held_out(text: str, one_in: int) -> bool:
    """Whether a document is for validation. By content, so that copies of it never stand on both sides."""
    return zlib.crc32(text.encode()) % one_in == 0


def _write(out: Path, name: str, texts: Iterable[str], tokenizer: TextTokenizer, source: dict[str, Any]) -> Shard:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    documents, size, stream = [], 0, iter(texts)
    while chunk := list(islice(stream, ENCODE)):
        documents += [np.array(ids, dtype) for ids in tokenizer.encode(chunk)]
        size += sum(len(text.encode()) for text in chunk)
    return write_shard(out, name, documents, size, source)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(out: Path, shards: list[Shard], tokenizer: TextTokenizer, source: dict[str, Any]) -> dict[str, Any]:
    splits = {split: [s for s in shards if s.name.startswith(split)] for split in ("train", "valid")}
    if not any(shard.tokens for shard in splits["valid"]):
        raise DataError(f"{out}: no document was held out for validation; give some with --valid")
    index = {
        "format": FORMAT,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end,
        "tokenizer": tokenizer.fingerprint,
        "provenance": {**source, "gva": gva.__version__},
        "tokens": {split: sum(s.tokens for s in found) for split, found in splits.items()},
        "splits": {split: [asdict(s) for s in found] for split, found in splits.items()},
    }
    write_atomically(out / INDEX, json.dumps(index, indent=2))
    return index
