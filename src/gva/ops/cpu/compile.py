"""C to a loaded library, by the machine's own compiler; kept in a folder of the user's for the processes to come."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("decode.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")


@functools.cache
def missing() -> str | None:
    """What keeps `library` from loading here, or None."""
    try:
        library()
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    if os.name != "posix":
        raise OSError(f"Linux or macOS; this is {platform.system()}")
    compiler = shlex.split(os.environ.get("CC", "")) or [next(filter(shutil.which, COMPILERS), COMPILERS[0])]
    if shutil.which(compiler[0]) is None:
        raise OSError(f"a C compiler, and there is no {compiler[0]!r} on the PATH (the variable CC may name another)")
    kept = folder()
    if kept is not None:
        file = kept / f"decode-{_key(compiler)}.so"
        if not file.exists():
            build(compiler, file)
        return ctypes.CDLL(str(file))
    with tempfile.TemporaryDirectory() as place:
        build(compiler, Path(place, "decode.so"))
        return ctypes.CDLL(str(Path(place, "decode.so")))


def folder() -> Path | None:
    """Where compiled code is kept: what lies there is run, so it must be this user's, and written by no other. None: it
    is not, or cannot be made."""
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gva")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except (OSError, RuntimeError):  # the latter where there is no home
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return path if private and os.access(path, os.W_OK) else None


def build(compiler: list[str], file: Path) -> None:
    """Under another name first: who looks meanwhile sees a whole file or none."""
    handle, begun = tempfile.mkstemp(dir=file.parent, suffix=".so")
    os.close(handle)
    try:
        command = [*compiler, *FLAGS, str(SOURCE), "-o", begun, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            told = f"{shlex.join(command)} said: {done.stderr[-500:]}"
            raise RuntimeError(f"a C compiler that takes {SOURCE.name}; {told}")
        os.replace(begun, file)
    finally:
        Path(begun).unlink(missing_ok=True)


def _key(compiler: list[str]) -> str:
    """Of what the machine code depends on: a home may be shared by machines that are not alike."""
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    told = [SOURCE.read_text(), FLAGS, compiler, path, os.stat(path).st_mtime_ns, platform.machine(), _processor()]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:24]


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
