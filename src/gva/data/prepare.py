"""Documents to token shards: parallel over input files, resumable per file, the same bytes in the end."""

import hashlib
import json
import os
import platform
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gva.data.bpe import train_apart
from gva.data.documents import LONGEST, DataError, kind_of, read_dataset, read_documents
from gva.data.holdout import HOLD_OUT, HoldOut, choose
from gva.data.preparation import Preparation, named, sum_of
from gva.data.shards import INDEX, Shard, ShardWriter, is_intact, read_record
from gva.data.tokenizer import TextTokenizer, load_tokenizer
from gva.errors import check
from gva.run.atomic import staging_folder
from gva.run.folder import locked

DOING = "preparing data"
BYTES = 256  # what a BPE begins with
BATCH = 256, 2**19  # texts in a call into the tokenizer, and characters, at most
STREAM_SHARD = 50_000  # documents per shard of a streamed dataset
STREAM_SAMPLE = 100_000  # of its documents, for a BPE


@dataclass(frozen=True)
class Settings:
    """How documents are found and tokenised."""

    tokenizer: Path | None = None
    vocab_size: int = 16384
    end: str | None = None
    field: str = "text"
    separator: str | None = None
    hold_out: int = HOLD_OUT

    def __post_init__(self) -> None:
        least = BYTES + 1  # each of them, and the end of a text
        check(self.vocab_size >= least, "vocab_size", self.vocab_size, f"must be at least {least}")

    def identity(self, given: TextTokenizer | None) -> dict[str, Any]:
        words = {name: getattr(self, name) for name in ("end", "field", "separator", "hold_out")}
        tokenizer, size = (None, self.vocab_size) if given is None else (given.fingerprint, None)
        return {**words, "tokenizer": tokenizer, "vocab_size": size}

    def given(self) -> TextTokenizer | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer, self.end)


@dataclass(frozen=True)
class Input:
    """A file, the shard that it becomes, and its content as it was at first."""

    path: Path
    split: str
    number: int
    sha256: str = ""
    stamp: tuple[int, ...] = field(default=(), compare=False)

    @property
    def shard(self) -> str:
        return f"{self.split}-{self.number:05d}"

    def summed(self) -> "Input":
        """The same with its sum."""
        stamp = self._stamp()
        return Input(self.path, self.split, self.number, sum_of(self.path), stamp)

    def check_unchanged(self) -> None:
        if self._stamp() != self.stamp:
            raise DataError(f"{self.path}: was changed while it was read; run the command again")

    def _stamp(self) -> tuple[int, ...]:
        found = self.path.stat()
        return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    def texts(self, settings: Settings) -> Iterator[str]:
        yield from read_documents(self.path, settings.field, settings.separator)
        self.check_unchanged()


def prepare_files(
    inputs: list[Path],
    out: Path,
    *,
    valid: list[Path] | None = None,
    workers: int = 1,
    progress: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Tokenize files into `out` and return the index; `settings` are those of `Settings`. Without a tokenizer, a BPE is
    trained on the inputs.

    Each input becomes one shard per split. A killed run goes on where it was; other inputs or settings than those that
    the folder was begun with are refused.
    """
    files = [Input(path, "train", number) for number, path in enumerate(inputs)]
    files += [Input(path, "valid", number) for number, path in enumerate(valid or [])]
    if not inputs:
        raise DataError("no input files; give some, or none at all for the Python standard library")
    for path in (file.path for file in files):
        kind_of(path)
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    how = Settings(**settings)
    how.given()  # what is wrong with it is told before the folder is made
    with locked(out, DOING):
        return _prepare_files(files, out, how, workers, progress, {"inputs": [path.name for path in inputs]})


def _prepare_files(
    files: list[Input], out: Path, how: Settings, workers: int, progress: bool, provenance: dict[str, Any]
) -> dict[str, Any]:
    workers = min(workers, len(files))
    with _mapper(workers) as run_all:
        files = list(run_all(Input.summed, files))
    training = [file for file in files if file.split == "train"]

    def texts() -> Iterator[str]:
        for file in training:
            yield from file.texts(how)

    told = ", ".join(str(file.path) for file in training[:3]) + ", ..." * (len(training) > 3)
    held = _choose(texts(), how, told) if training == files else None
    inputs = {file.shard: named(file.path.name, file.sha256) for file in files}
    preparation = Preparation(out, {"inputs": inputs, **how.identity(given := how.given())}, provenance)
    tokenizer = preparation.settle_tokenizer(given, lambda: train_apart(texts(), how.vocab_size, progress))
    bar = tqdm(total=sum(file.stamp[0] for file in files), unit="B", unit_scale=True, disable=not progress)
    shards: list[Shard] = []
    with bar, _mapper(workers) as run_all:
        for file, done in zip(files, run_all(partial(_prepare_file, out, how, held), files), strict=True):
            shards += done
            bar.update(file.stamp[0])
    return preparation.publish(shards, tokenizer)


def prepare_dataset(
    name: str,
    out: Path,
    *,
    config: str | None = None,
    split: str = "train",
    max_documents: int | None = None,
    shard_documents: int = STREAM_SHARD,
    progress: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Tokenize a HuggingFace dataset as it streams, in one process. After a kill the stream is read again, but
    shards that are already there are not tokenized again."""
    how, source = Settings(**settings), {"dataset": name, "config": config, "split": split}
    given = how.given()

    def stream(most: int | None = None) -> Iterator[str]:
        return islice(islice(read_dataset(name, how.field, split, config), max_documents), most)

    with locked(out, DOING):
        held = _choose(stream(), how, f"dataset {name}, split {split!r}")
        sample = None if given else _sum_of_texts(stream(STREAM_SAMPLE))[:16]  # which a BPE is trained on
        more = {"shard_documents": shard_documents, "sample": sample}
        preparation = Preparation(out, {**source, **more, **how.identity(given)}, source)
        tokenizer = preparation.settle_tokenizer(
            given, lambda: train_apart(stream(STREAM_SAMPLE), how.vocab_size, progress)
        )
        shards: list[Shard] = []
        texts = stream()
        with tqdm(unit=" documents", disable=not progress) as bar:
            for number, chunk in enumerate(iter(lambda: list(islice(texts, shard_documents)), [])):
                part = {"first": number * shard_documents, "documents": len(chunk), "field": how.field}
                part |= {"sha256": _sum_of_texts(chunk)}
                shards += _write_splits(out, number, chunk, tokenizer, {**source, **part}, "train", held)
                bar.update(len(chunk))
        return preparation.publish(shards, tokenizer)


def prepare_standard_library(out: Path, vocab_size: int = 2048, progress: bool = True) -> dict[str, Any]:
    """The embedded default: the source of the standard library of the interpreter that runs this."""
    how = Settings(vocab_size=vocab_size, hold_out=25)
    home = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "turtledemo"}
    files = [p for p in sorted(home.rglob("*.py")) if not skipped & set(p.relative_to(home).parts)]
    texts = (p.read_text("utf-8", errors="ignore") for p in files)
    source = {"inputs": [f"standard library of Python {platform.python_version()}, {len(files)} files"]}
    with locked(out, DOING), staging_folder(out) as scratch:
        joined = scratch / "source.jsonl"
        joined.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()))
        return _prepare_files([Input(joined, "train", 0)], out, how, 1, progress, source)


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


def _choose(texts: Iterable[str], how: Settings, told: str) -> HoldOut:
    try:
        return choose(texts, how.hold_out)
    except LookupError:
        raise DataError(f"{told}: no text in it; give an input that has some") from None


def _sum_of_texts(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for content in (text.encode() for text in texts):
        found.update(len(content).to_bytes(8, "little") + content)
    return found.hexdigest()


def _prepare_file(out: Path, how: Settings, held: HoldOut | None, file: Input) -> list[Shard]:
    """One input file; runs in a worker process."""
    tokenizer = load_tokenizer(out / "tokenizer")
    source: dict[str, Any] = {"file": file.path.name, "sha256": file.sha256, "field": how.field}
    if kind_of(file.path)[0] == ".txt" and how.separator != "":
        source["cut"] = how.separator or LONGEST
    return _write_splits(out, file.number, file.texts(how), tokenizer, source, file.split, held)


def _write_splits(
    out: Path,
    number: int,
    documents: Iterable[str],
    tokenizer: TextTokenizer,
    source: dict[str, Any],
    split: str,
    held: HoldOut | None,
) -> list[Shard]:
    """The shards of one input: its split alone, or what of it is held out too. Shards that are whole and of the same
    source are kept."""
    splits = (split,) if held is None else ("train", "valid")
    source = {**source, "hold_out": 0 if held is None else held.noted(), "tokenizer": tokenizer.fingerprint}
    names = {name: f"{name}-{number:05d}" for name in splits}
    found = [record for name in names.values() if (record := read_record(out, name)) and record.source == source]
    if len(found) == len(splits) and all(is_intact(out, record) for record in found):
        return found
    (out / INDEX).unlink(missing_ok=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    with ExitStack() as stack:
        writers = {name: stack.enter_context(ShardWriter(out, shard, dtype)) for name, shard in names.items()}
        sides = (
            ((split, text) for text in documents) if held is None else chain.from_iterable(map(held.sides, documents))
        )
        for batch in _batches(sides, tokenizer):
            for (name, text, last), ids in zip(batch, tokenizer.ids([text for _, text, _ in batch]), strict=True):
                writers[name].write(ids, len(text.encode()))
                if last:
                    writers[name].write([tokenizer.end])
                    writers[name].end_document()
    return [writer.record(source) for writer in writers.values()]


def _batches(parts: Iterable[tuple[str, str]], tokenizer: TextTokenizer) -> Iterator[list[tuple[str, str, bool]]]:
    """Documents in pieces that are encoded as if they were whole, gathered for the tokenizer: the split, the text of a
    piece, and whether its document ends with it."""
    most, longest = BATCH
    batch: list[tuple[str, str, bool]] = []
    length = 0
    for split, text in parts:
        pieces = list(tokenizer.pieces(text))
        for number, piece in enumerate(pieces, 1):
            batch.append((split, piece, number == len(pieces)))
            length += len(piece)
            if len(batch) == most or length >= longest:
                yield batch
                batch, length = [], 0
    if batch:
        yield batch
