"""Documents from files: jsonl, txt and parquet, each plain or .gz, .xz, .zst; and from HuggingFace datasets."""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

KINDS = (".jsonl", ".txt", ".parquet", ".py")
COMPRESSIONS = (".gz", ".xz", ".zst")


class DataError(ValueError):
    """Input data that cannot be used, with the file and the place in it."""


def kind_of(path: Path) -> tuple[str, str]:
    """('.jsonl', '.xz') for 'a.jsonl.xz'; refuses what cannot be read."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    kind = Path(path.name.removesuffix(compression)).suffix
    if kind not in KINDS:
        raise DataError(f"{path}: cannot be read; known are {', '.join(KINDS)}, plain or {', '.join(COMPRESSIONS)}")
    return kind, compression


def read_documents(path: Path, field: str = "text") -> Iterator[str]:
    """The documents of a file: a jsonl line, a parquet row, or a whole text file each."""
    kind, compression = kind_of(path)
    with _opened(path, compression) as stream:
        if kind == ".jsonl":
            yield from _texts(_jsonl(path, stream), field, f"{path}: line")
        elif kind == ".parquet":
            yield from _parquet(path, stream, field)
        else:
            yield stream.read().decode("utf-8", errors="strict")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a jsonl file, each with the number of its line."""
    kind, compression = kind_of(path)
    if kind != ".jsonl":
        raise DataError(f"{path}: must be jsonl, plain or {', '.join(COMPRESSIONS)}")
    with _opened(path, compression) as stream:
        yield from _jsonl(path, stream)


def read_dataset(name: str, field: str = "text", split: str = "train", config: str | None = None) -> Iterator[str]:
    """Documents of a HuggingFace dataset, streamed: a name on the hub, or a local dataset folder."""
    datasets = optional("datasets", "train", "reading a HuggingFace dataset")
    rows = datasets.load_dataset(name, config, split=split, streaming=True)
    yield from _texts(enumerate(rows), field, f"dataset {name}: row")


def optional(module: str, extra: str, use: str, otherwise: str = "") -> Any:
    """A module that one of our extras brings; without it, a DataError that says what this use of it needs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"{use} needs: pip install 'grouped-value-attention[{extra}]'{otherwise}") from error


def _texts(rows: Iterable[tuple[int, dict[str, Any]]], field: str, place: str) -> Iterator[str]:
    for number, row in rows:
        if not isinstance(row.get(field), str):
            raise DataError(f"{place} {number} has no text in field {field!r} (it has {sorted(row)})")
        yield row[field]


@contextmanager
def _opened(path: Path, compression: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file; what goes wrong while they are read is told with the file's name."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with _OPENERS[compression](path) if compression else path.open("rb") as stream:
            yield stream
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or not a {compression} file ({error}); fetch it again") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _open_zst(path: Path) -> BinaryIO:
    zstandard = optional("zstandard", "train", f"{path}: reading .zst")
    # Read whole: a streaming reader takes a truncated file without complaint, a frame object knows its end.
    try:
        raw = path.read_bytes()
        reader = zstandard.ZstdDecompressor().decompressobj()
        data, rest = reader.decompress(raw), b""
        while reader.eof and (rest := reader.unused_data):  # concatenated frames
            reader = zstandard.ZstdDecompressor().decompressobj()
            data += reader.decompress(rest)
        if not reader.eof:
            raise EOFError("the last zstd frame does not end")
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    return io.BytesIO(data)


_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}


def _jsonl(path: Path, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is a {type(row).__name__}, must be an object")
        yield number, row


def _parquet(path: Path, stream: BinaryIO, field: str) -> Iterator[str]:
    pa, pq = (optional(name, "train", f"{path}: reading parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # A compressed stream cannot seek, which parquet must.
        seekable = isinstance(stream, io.BufferedReader)
        file = pq.ParquetFile(stream if seekable else io.BytesIO(stream.read()))
        if field not in file.schema_arrow.names:
            raise DataError(f"{path}: no column {field!r}, only {file.schema_arrow.names}")
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise DataError(f"{path}: column {field!r} has {text!r} where text should be")
                yield text
    except pa.ArrowException as error:
        raise DataError(f"{path}: truncated or not a parquet file ({error}); fetch it again") from error
