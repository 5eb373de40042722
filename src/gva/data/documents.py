"""Documents from files: jsonl, parquet, Python and plain text, each plain or .gz, .xz, .zst; and from HuggingFace
datasets."""

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
LONGEST = 2**14  # characters of a document that is cut from plain text, unless one line has more


class DataError(ValueError):
    """Input data that cannot be used, with the file and the place in it."""


def kind_of(path: Path) -> tuple[str, str]:
    """('.jsonl', '.xz') for 'a.jsonl.xz'; refuses what cannot be read."""
    kind, compression = _kind(path)
    if kind not in KINDS:
        raise DataError(f"{path}: cannot be read; known are {', '.join(KINDS)}, plain or {', '.join(COMPRESSIONS)}")
    return kind, compression


def _kind(path: Path) -> tuple[str, str]:
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Path(path.name.removesuffix(compression)).suffix, compression


def read_documents(path: Path, field: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of a file: a jsonl line, a parquet row, a whole Python file each. Plain text is cut where
    `separator` stands; without one at blank lines, see `_passages`; if it is empty, not at all."""
    kind, compression = kind_of(path)
    with _opened(path, compression) as stream:
        if kind == ".jsonl":
            yield from _texts(_jsonl(path, stream), field, f"{path}: line")
        elif kind == ".parquet":
            yield from _parquet(path, stream, field)
        elif kind == ".py" or separator == "":
            yield stream.read().decode("utf-8", errors="strict")
        else:
            lines = _lines(path, stream)
            texts = _between(lines, separator) if separator else _passages(lines)
            yield from (text for text in texts if text.strip())


def files_in(place: Path, but: Path | None = None) -> list[Path]:
    """A file itself, or the files in a folder and in those within it that documents can be read from, by their names;
    hidden ones and all in the folder `but` are left out."""
    if not place.is_dir():
        return [place]
    found = (path for path in sorted(place.rglob("*")) if path.is_file() and _kind(path)[0] in KINDS)
    shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(place).parts))
    return [path for path in shown if but is None or not path.resolve().is_relative_to(but.resolve())]


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
            raise DataError(
                f"{place} {number} has no text in field {field!r} (it has {sorted(row)}); say with --field where it is"
            )
        try:
            row[field].isascii() or row[field].encode()
        except UnicodeEncodeError as error:
            what = f"half of a character, {row[field][error.start]!r} at {error.start}, which no text can hold"
            raise DataError(f"{place} {number}: has {what}; mend or remove that line") from None
        yield row[field]


def _passages(lines: Iterable[str]) -> Iterator[str]:
    """Documents of up to LONGEST characters, each ending with as late a blank line as that allows; where there is none,
    at the end of a line. Joined they are the text again."""
    text, paragraph = "", 0  # where in it a paragraph last ended
    for line in lines:
        while text and len(text) + len(line) > LONGEST:
            end = paragraph or len(text)
            yield text[:end]
            text, paragraph = text[end:], 0
        text += line
        if not line.strip():
            paragraph = len(text)
    yield text


def _between(lines: Iterable[str], separator: str) -> Iterator[str]:
    """What stands between separators, without the line ends that are theirs."""
    text, searched = "", 0
    for line in lines:
        text += line
        if text.find(separator, max(0, searched - len(separator))) >= 0:
            *whole, text = text.split(separator)
            yield from (document.strip("\r\n") for document in whole)
        searched = len(text)
    yield text.strip("\r\n")


def _lines(path: Path, stream: BinaryIO) -> Iterator[str]:
    place = 0
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8 text (byte {place + error.start}) in line {number}; write the file in UTF-8"
            ) from error
        place += len(line)


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
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); write the file in UTF-8") from error


class _Zst(io.RawIOBase):
    """Frames one after another, decompressed as they are read. A file that ends within one is told: a reader of the
    library takes that for its end."""

    def __init__(self, path: Path) -> None:
        zstandard = optional("zstandard", "train", f"{path}: reading .zst")
        self._new, self._errors = zstandard.ZstdDecompressor, zstandard.ZstdError
        self._file, self._made = path.open("rb"), memoryview(b"")
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            rest = self._frame.unused_data if self._frame and self._frame.eof else b""
            if not (rest := rest or self._file.read(2**13)):
                if self._frame and not self._frame.eof:
                    raise EOFError("the last zstd frame does not end")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new().decompressobj()
            try:
                self._made = memoryview(self._frame.decompress(rest))
            except self._errors as error:
                raise EOFError(str(error)) from error
        taken = min(len(buffer), len(self._made))
        buffer[:taken], self._made = self._made[:taken], self._made[taken:]
        return taken

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zst(path: Path) -> BinaryIO:
    return io.BufferedReader(_Zst(path))


_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}


def _jsonl(path: Path, stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); mend or remove that line") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}: line {number} is a {type(row).__name__}, must be an object; mend or remove that line"
            )
        yield number, row


def _parquet(path: Path, stream: BinaryIO, field: str) -> Iterator[str]:
    pa, pq = (optional(name, "train", f"{path}: reading parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # A compressed stream cannot seek, which parquet must.
        seekable = isinstance(stream, io.BufferedReader) and stream.seekable()
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
