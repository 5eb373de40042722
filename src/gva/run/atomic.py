"""Writing so that whoever looks, and whatever is killed, there is the old or the new, never half of it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gva.run.files import opened, remove


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replaces what has the name, a link too, and never what a link leads to."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two writers never share one
    remove(temporary)
    try:
        with opened(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # or a machine that fails finds the name without the bytes
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise


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
