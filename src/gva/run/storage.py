"""The files of a checkpoint, in the format of torch's distributed checkpoints: read as data, and known by their sums.

Which file holds what is listed in `.metadata`, a pickle. It is opened by an unpickler that knows the few classes of
such a list and makes nothing else, and the list may name tensors in files of the folder alone.
"""

import mmap
import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gva.run.files import FolderError, inside

LIST = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
_PAGE, _CHUNK = 4096, 2**18  # a chunk stays in the cache of a core


class Writer(FileSystemWriter):
    """Writes, and then sums what this rank has written, in the thread that writes beside training."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sums: dict[str, str] = {}  # by the names of files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            self.sums[name] = checksum(Path(self.path) / name, mapped=True)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.sums[LIST] = checksum(Path(self.path) / LIST)


class Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_list(Path(self.path))


def read_list(folder: Path) -> Metadata:
    """What a checkpoint says that it holds, if that is tensors in its own files."""
    with (folder / LIST).open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except FolderError:
            raise
        except Exception as error:  # whatever a stream of bytes can lead an unpickler to
            raise FolderError(f"{LIST} is damaged: {error}") from None
    tensors, places = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(found, Metadata) or not isinstance(tensors, dict) or not isinstance(places, dict):
        raise FolderError(f"{LIST} is not the list of a checkpoint")
    for name, what in tensors.items():
        if not isinstance(what, TensorStorageMetadata):  # the library would unpickle it without a check
            raise FolderError(f"{LIST} has an object {name!r} that is not a tensor; do not use this folder")
    for place in places.values():
        inside(folder, getattr(place, "relative_path", None), LIST)
        if getattr(place, "transform_descriptors", None):
            raise FolderError(f"{LIST} asks for a transformation of {place.relative_path}, which none of ours has")
    return found


_InPython: Any = pickle._Unpickler  # that in C cannot be kept from `build`


class _Unpickler(_InPython):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _KNOWN or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise FolderError(f"{LIST} asks for {module}.{name}, which no checkpoint needs; do not use this folder")

    def build(self) -> None:
        """Gives the object below it attributes: to an instance its fields, but to a class what all would then have."""
        if callable(known := self.stack[-2]):
            raise FolderError(f"{LIST} would change {known.__name__} for everybody; do not use this folder")
        super().load_build()

    dispatch: ClassVar = {**_InPython.dispatch, pickle.BUILD[0]: build}


def checksum(path: Path, mapped: bool = False) -> str:
    """Size and sum of a file: the CRC of the sums of its pages. It costs little more than reading, and shows what a
    disk or a copy has damaged; against someone who means harm it is no help. `mapped` is for what this process has
    just written: it takes half the time, but where a disk cannot be read it would end the process without a word."""
    crc, size = 0, 0
    with path.open("rb") as file:
        for piece in _mapped(file) if mapped else _read(file):
            whole = np.pad(piece, (0, -len(piece) % _PAGE)) if len(piece) % _PAGE else piece
            words = whole.view(np.uint64).reshape(-1, _PAGE // 8)
            crc, size = zlib.crc32(words.sum(1), crc), size + len(piece)
    return f"{size}:{crc:08x}"


def _read(file: IO[bytes]) -> Iterator[np.ndarray]:
    buffer = np.empty(_CHUNK, np.uint8)
    while read := file.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:read]


def _mapped(file: IO[bytes]) -> Iterator[np.ndarray]:
    if size := os.fstat(file.fileno()).st_size:
        pages = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        yield from (pages[start : start + _CHUNK] for start in range(0, size, _CHUNK))
