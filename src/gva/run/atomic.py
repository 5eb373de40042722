"""Writing so that whoever looks, and whatever is killed, there is the old or the new, never half of it."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gva.run.files import opened, remove


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the name once it is whole. It replaces what has the name, a link too, and never
    what a link leads to."""
    file, temporary = _beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a machine that fails finds the name without the bytes
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise


def write_atomically(path: Path, content: bytes | str) -> None:
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _beside(path: Path) -> tuple[IO[bytes], Path]:
    """A new hidden file, and its name, with a lock for as long as it is open: two writers never share one, and one that
    nobody holds was left by a writer that was killed, and goes."""
    number = 0
    while True:
        temporary = path.with_name(f".{path.name}.{number}.tmp")
        if _is_held(temporary):
            number += 1
            continue
        remove(temporary)
        with suppress(FileExistsError):
            file = opened(temporary, "xb")
            fcntl.flock(file, fcntl.LOCK_EX)
            if temporary.exists() and os.path.samestat(os.fstat(file.fileno()), temporary.lstat()):
                return file, temporary
            file.close()  # another writer took it for one that was left, in the moment before its lock


def _is_held(path: Path) -> bool:
    """Whether a living process is writing this file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left. For whoever holds the folder alone."""
    for left in folder.glob(".*.tmp"):
        remove(left)


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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, which takes its name once it is whole; refused where something is there already."""
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{path}: there is something already; remove it, or give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.saving-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.saving-", dir=path.parent)) / path.name
    try:
        staging.mkdir()  # in a folder that is its owner's alone, with the rights that are usual for new ones
        yield staging
        for file in staging.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        os.replace(staging, path)
    finally:
        shutil.rmtree(staging.parent, ignore_errors=True)
