"""The sums of files, by which a folder knows its bytes: they cost little more than reading, and show what a disk or a
copy has damaged. Against someone who means harm they are no help."""

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from gva.run.files import FolderError, inside

_PAGE, _CHUNK = 4096, 2**18  # a chunk stays in the cache of a core


def checksum(path: Path, mapped: bool = False) -> str:
    """Size and sum of a file: the CRC of the sums of its pages. `mapped` is for what this process has just written: it
    takes half the time, but where a disk cannot be read it would end the process without a word."""
    crc, size = 0, 0
    with path.open("rb") as file:
        for piece in _mapped(file) if mapped else _read(file):
            whole = np.pad(piece, (0, -len(piece) % _PAGE)) if len(piece) % _PAGE else piece
            words = whole.view(np.uint64).reshape(-1, _PAGE // 8)
            crc, size = zlib.crc32(words.sum(1), crc), size + len(piece)
    return f"{size}:{crc:08x}"


@contextmanager
def comparing(folder: Path, files: Iterable[tuple[str, str]], source: Path) -> Iterator[Future[str]]:
    """Compares files of a folder with their sums in a thread, while the block loads them: on a second core it costs
    next to nothing. The result, there when the block ends, is what is wrong, or nothing."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(_compared, folder, list(files), source)


def _compared(folder: Path, files: list[tuple[str, str]], source: Path) -> str:
    try:
        for name, told in files:
            if checksum(inside(folder, name, source)) != told:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, FolderError) as error:
        return str(error)
    return ""


def _read(file: IO[bytes]) -> Iterator[np.ndarray]:
    buffer = np.empty(_CHUNK, np.uint8)
    while read := file.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:read]


def _mapped(file: IO[bytes]) -> Iterator[np.ndarray]:
    if size := os.fstat(file.fileno()).st_size:
        pages = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        yield from (pages[start : start + _CHUNK] for start in range(0, size, _CHUNK))
