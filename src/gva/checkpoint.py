"""Checkpoints on disk: never half-written, and refused by name when something of them is missing."""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def verify_folder(folder: str | os.PathLike) -> None:
    """Raise OSError that names the file if a safetensors shard of a checkpoint is missing or truncated."""
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
                except (ValueError, KeyError, TypeError):
                    expected = None
    if expected is None:
        raise OSError(f"{path}: {size} bytes, not a whole safetensors file; copy the checkpoint again")
    if size != expected:
        raise OSError(f"{path}: {size} bytes where its header announces {expected}; copy the checkpoint again")


@contextmanager
def staging_folder(target: str | os.PathLike) -> Iterator[Path]:
    """A hidden folder inside `target`, so on the same file system, that is gone afterwards whatever happens."""
    target = Path(target)
    if target.is_file():
        raise NotADirectoryError(f"save_directory={str(target)!r}: is a file, must be a folder")
    created = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    for left in target.glob(".saving-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if created and not any(target.iterdir()):
            target.rmdir()


def publish(staging: Path, target: str | os.PathLike) -> None:
    """Move finished files into `target`. Old weights go first and what names the new ones comes last, so that a
    folder torn by a kill does not load, instead of loading half of each."""
    target = Path(target)
    last = (INDEX, WEIGHTS)
    files = sorted(staging.iterdir(), key=lambda path: path.name in last)
    if any(path.name in last for path in files):
        for name in [*shards_of(target), *last]:  # read before any of them is gone
            (target / name).unlink(missing_ok=True)
    for path in files:
        os.replace(path, target / path.name)


def shards_of(folder: Path) -> list[str]:
    """The shards that a folder's index names; none if it has no readable index."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError):
        return []
