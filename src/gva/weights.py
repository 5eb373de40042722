"""The weights of a HuggingFace folder: never half-written, and refused by name when something of them is missing."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gva.run.atomic import staging_folder
from gva.run.files import FolderError, inside, read_object

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# How commands open a folder with transformers: none of its Python, nor a question whose yes runs it; of its weights, no
# pickle, and no kernel that its config would fetch.
CODELESS = {"trust_remote_code": False}
AS_DATA = {**CODELESS, "use_safetensors": True, "attn_implementation": "sdpa"}


def verify_folder(folder: str | os.PathLike) -> None:
    """Raise OSError that names the file if a safetensors shard of a checkpoint is missing or truncated, and FolderError
    if its index names a file outside."""
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        names = shards_of(folder)
        if not names:
            raise OSError(f"{index}: not a readable shard index; copy the checkpoint again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise OSError(
                f"{folder}: {len(missing)} of {len(names)} shards are missing ({', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}); copy the checkpoint again"
            )
    else:
        names = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    for name in names:
        verify_shard(folder / name)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has its config and all of its weights, none of them cut short."""
    try:
        verify_folder(folder)
        weights = shards_of(folder) or (folder / WEIGHTS).is_file()
        return bool(read_object(folder / "config.json", "")) and bool(weights)
    except (OSError, FolderError):
        return False


def fingerprint(config: bytes, files: Iterable[Path]) -> str:
    """Changes with any byte of a config and of the files of weights."""
    digest = hashlib.sha256(config)
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def verify_shard(path: Path) -> None:
    """Compare a shard's size with what its own header announces; reads the header alone."""
    size = path.stat().st_size
    expected = None
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) == 8:
            (header_size,) = struct.unpack("<Q", prefix)
            if 8 + header_size <= size:
                try:
                    header = json.loads(file.read(header_size))
                    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
                    expected = 8 + header_size + max(ends, default=0)
                except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
                    expected = None
    if expected is None:
        raise OSError(f"{path}: {size} bytes, not a whole safetensors file; copy the checkpoint again")
    if size != expected:
        raise OSError(f"{path}: {size} bytes where its header announces {expected}; copy the checkpoint again")


@contextmanager
def replacing(folder: str | os.PathLike) -> Iterator[Path]:
    """A staging folder whose files move into `folder` once all are written. Old weights go first and what names the new
    ones comes last, so that a folder torn by a kill does not load, instead of loading half of each."""
    folder, last = Path(folder), (INDEX, WEIGHTS)
    with staging_folder(folder) as staging:
        yield staging
        files = sorted(staging.iterdir(), key=lambda path: path.name in last)
        if any(path.name in last for path in files):
            for name in [*shards_of(folder), *last]:  # read before any of them is gone
                (folder / name).unlink(missing_ok=True)
        for path in files:
            os.replace(path, folder / path.name)


def shards_of(folder: Path) -> list[str]:
    """The shards that a folder's index names, each a file of the folder; none if it has no readable index."""
    try:
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return []
    return sorted({inside(folder, name, folder / INDEX).name for name in names})
