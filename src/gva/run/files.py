"""The files of a folder, which may come from a stranger: a name stays in it, a link out of it is not written through,
and what is read is data."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import IO, Any

_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]{1,200}")


class FolderError(ValueError):
    """A folder that cannot be used as it is: a file of it is damaged, or leads out of it. Says which and what to do."""


def inside(folder: Path, name: object, source: Path | str | None = None) -> Path:
    """The file or folder of this name in `folder`. `source` is what says the name, for whoever must mend it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise FolderError(f"{source or folder}: {name!r} is not the name of a file in {folder}; do not use this folder")
    return folder / name


def within(folder: Path, name: str) -> Path:
    """The same for what will be written into; refused where it is a link to somewhere else."""
    path = inside(folder, name)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FolderError(
            f"{path}: a link to {path.resolve()}, outside of the folder; remove it, or have the whole of {folder} there"
        )
    return path


def to_copy(path: Path) -> Path:
    """The same for a file that will be copied: a link could put a secret of this machine beside what is given away. The
    hub's cache is one folder, in which a snapshot is links into `blobs`."""
    folder = path.parent.resolve()
    whole = folder.parents[1] if folder.parent.name == "snapshots" else folder
    if not path.resolve().is_relative_to(whole):
        raise FolderError(f"{path}: a link to {path.resolve()}, outside of the folder; put a copy in its place")
    return path


def subfolder(folder: Path, name: str) -> Path:
    """A folder of `folder` to write into, made if need be."""
    path = within(folder, name)
    path.mkdir(parents=True, exist_ok=True)
    return path


def emptied(folder: Path, name: str) -> Path:
    """The same without what was in it, or in its place."""
    remove(inside(folder, name))
    return subfolder(folder, name)


def remove(path: Path) -> None:
    """A file, a folder and all in it, or a link alone; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def opened(path: Path, mode: str) -> IO[Any]:
    """A file to write to ("w" or "x", "a", with "b" for bytes) that is not a link: `open` would follow it."""
    kinds = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND}
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | kinds[mode[0]]
    if path.is_symlink():
        raise FolderError(f"{path}: a link, and what it leads to would be written over; remove it")
    return os.fdopen(os.open(path, flags, 0o666), mode)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; `remedy` is what to do where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path}: not JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise FolderError(f"{path}: holds a {type(content).__name__} where an object should be; {remedy}")
    return content
