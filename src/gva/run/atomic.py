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
