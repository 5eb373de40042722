"""The files of a checkpoint, in the format of torch's distributed checkpoints: read as data.

Which file holds what is listed in `.metadata`, a pickle. It is opened by an unpickler that knows the few classes of
such a list and makes nothing else, and the list may name tensors in files of the folder alone.
"""

import pickle
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gva.run.files import FolderError, inside
from gva.run.sums import checksum

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
    @cached_property
    def listed(self) -> Metadata:
        return read_list(Path(self.path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.listed


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
