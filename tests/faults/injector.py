"""Commands of gva run in processes whose file operations are counted, and ended at the N-th of them.

A job is one command line. A server imports the library once, under preload.c, and forks for every job, so that a kill
costs a blink; what a comparison starts is forked too. All processes of a job count together, and end together.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
KILL, FULL = 0, 1  # what happens at an operation: the end of every process, or a disk that is full from there on
PROCESSES = 256


class Control(ctypes.Structure):
    """What preload.c obeys, and where it counts."""

    _fields_ = (
        ("count", ctypes.c_int),
        ("at", ctypes.c_int),
        ("half", ctypes.c_int),
        ("mode", ctypes.c_int),
        ("processes", ctypes.c_int),
        ("pids", ctypes.c_int * PROCESSES),
        ("folder", ctypes.c_char * 4096),
    )


@dataclass(frozen=True)
class Outcome:
    operations: int  # that changed files under the folder
    code: int  # of the command; negative: the signal that ended it
    said: str


class Injector:
    """A server of jobs. `run` runs one command; `at` is the operation that fails."""

    def __init__(self, scratch: Path) -> None:
        library, control = scratch / "preload.so", scratch / "control"
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "preload.c", "-ldl"], check=True)
        control.write_bytes(bytes(ctypes.sizeof(Control)))
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        quiet = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {**os.environ, **single, **quiet, "LD_PRELOAD": str(library), "FAULTS_CONTROL": str(control)}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, "-m", "faults.injector"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, words: list[str], folder: Path, at: int = 0, half: bool = False, mode: int = KILL) -> Outcome:
        job = {"words": words, "folder": str(folder), "at": at, "half": half, "mode": mode}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))

    def __enter__(self) -> "Injector":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)


def _serve() -> None:
    import gva.data.prepare  # what jobs need is imported once, here
    import gva.report
    import gva.study.child
    import gva.train.loop  # noqa: F401
    from gva.cli import main
    from gva.study import runner

    runner.subprocess = _Forking  # type: ignore[assignment]

    with open(os.environ["FAULTS_CONTROL"], "r+b") as file:
        control = Control.from_buffer(mmap.mmap(file.fileno(), 0))
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile("w+") as said:
            control.count = control.processes = 0
            control.at, control.half, control.mode = job["at"], job["half"], job["mode"]
            control.folder = job["folder"].encode()
            child = _fork(lambda words=job["words"]: main(words), said.fileno(), said.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            control.folder = b""
            said.seek(0)
            answers.write(json.dumps({"operations": control.count, "code": status, "said": said.read()[-2000:]}) + "\n")
            answers.flush()


def _fork(work: Callable[[], int], out: int, err: int) -> int:
    """A process that does this work and ends with its code."""
    child = os.fork()
    if child:
        return child
    os.dup2(out, 1)
    os.dup2(err, 2)
    code = 70
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Forking:
    """In place of `subprocess`, where a comparison starts the process of a row: `python -m gva.study.child JOB`."""

    class Popen:
        def __init__(self, words: list[str], stdout: IO, stderr: IO, **settings: Any) -> None:
            from gva.study import child

            job = json.loads(words[-1])
            self.pid = _fork(lambda: child.main(job), stdout.fileno(), stderr.fileno())
            self.returncode: int | None = None

        def poll(self) -> int | None:
            if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
            return self.returncode

        def send_signal(self, number: int) -> None:
            os.kill(self.pid, number)


if __name__ == "__main__":
    _serve()
