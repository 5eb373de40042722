"""Executes a matrix: rows one after another, the seeds of a row in one process of its own; then, on a GPU, measures how
fast each row decodes.

A crash costs the run that crashed: the other seeds of its row go on in a new process, the other rows in theirs. A run
is done once its metrics say so, so that the same command goes on after a stop or a kill.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from gva.data.source import described, open_data
from gva.run.files import opened
from gva.run.folder import MODEL, refuse_another
from gva.run.metrics import METRICS, is_done, read_metrics
from gva.study import speed
from gva.study.child import KEEPS, discard_weights
from gva.study.matrix import Matrix, Row, row_folder, run_folder, write_row
from gva.train.recipe import identity_defaults, identity_of
from gva.weights import is_whole

LOG = "log.txt"
LOG_TAIL = 15  # lines of it that a failure shows
POLL = 0.25  # seconds
ENVIRONMENT = {
    # Threads that spin while they wait make training several times slower on cores shared with others.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Ranks agree on a stop where they next meet, every log_every steps; torchrun would kill them after 30 seconds.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    # `python -m` would take modules from the folder that one stands in, which may be a stranger's.
    "PYTHONSAFEPATH": "1",
}


@dataclass
class Outcome:
    """How the chosen runs ended."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the run and the end of its log
    stopped: bool = False


@dataclass
class Runner:
    """`device`, `weights` (all | model | none) and `ranks` (processes per run, through torchrun) hold for all runs.

    `decode_speed`: measure it, where training is on a GPU; `fa3` is FlashAttention-3, for rows that decode through it.
    """

    matrix: Matrix
    data: Path
    out: Path
    _: KW_ONLY
    device: str | None = None
    weights: str = "model"
    ranks: int = 1
    progress: bool = True
    decode_speed: bool = True
    fa3: Path | None = None

    def __post_init__(self) -> None:
        self.decode_speed &= speed.on_gpu(self.device)
        dataset = open_data(self.data)
        self.vocab_size, self.data_name = dataset.index["vocab_size"], described(dataset)
        self.outcome = Outcome()
        self._child: subprocess.Popen | None = None

    def execute(self, runs: list[tuple[Row, int]]) -> Outcome:
        """Bring every run to its end, or tell why not. Settings that changed are refused before anything starts."""
        self._refuse_changes(runs)
        pending = [run for run in runs if not self._done(*run)]
        for row, seed in (run for run in runs if run not in pending):
            out = run_folder(self.out, row.name, seed)
            # Asked for, or left to be done by a kill; what an earlier command was told to keep, the default leaves.
            if self.weights == "none" or (out / KEEPS).exists():
                discard_weights(out, self.weights)
            self.outcome.finished.append(f"{row.name}:{seed}")
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with closing(Progress(self.matrix.preset, runs, pending, self.out, self.progress)) as progress:
                for _, group in groupby(pending, key=lambda run: run[0].name):
                    self._run_row(list(group), progress)
                    if self.outcome.stopped:
                        break
            if self.decode_speed:
                self._measure_speeds([row for row, _ in runs])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.outcome

    def _run_row(self, group: list[tuple[Row, int]], progress: "Progress") -> None:
        row, seeds = group[0][0], [seed for _, seed in group]
        write_row(row_folder(self.out, row.name), self.matrix, row, self.data_name)
        while seeds and not self.outcome.stopped:
            batch = seeds[:1] if self.ranks > 1 else seeds  # a torchrun group lives for one run
            code = self._run_child(row, batch, progress)
            done = [seed for seed in batch if self._done(row, seed)]
            self.outcome.finished += [f"{row.name}:{seed}" for seed in done]
            left = [seed for seed in seeds if seed not in done]
            if code == 130 or self.outcome.stopped:
                self.outcome.stopped = True
                return
            if len(done) < len(batch):
                failed = next(seed for seed in batch if seed not in done)
                self.outcome.failed[f"{row.name}:{failed}"] = self._log_tail(row, code)
                left.remove(failed)
            seeds = left

    def _run_child(self, row: Row, seeds: list[int], progress: "Progress") -> int:
        folder = row_folder(self.out, row.name)
        job = {
            "preset": self.matrix.preset, "name": row.name, "variant": row.variant, "overrides": row.overrides,
            "seeds": seeds, "data": str(self.data), "folder": str(folder), "device": self.device,
            "weights": self.weights, "parent": os.getpid(),
            "from": row.start and str(row.start), "teacher": row.teacher and str(row.teacher),
        }  # fmt: skip
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m"]
        words = [*(launcher if self.ranks > 1 else []), "gva.study.child", json.dumps(job)]
        runs = [run_folder(self.out, row.name, seed) for seed in seeds]
        return self._run_module(folder, words, lambda: progress.look(runs))

    def _run_module(self, folder: Path, words: list[str], look: Callable[[], None] = lambda: None) -> int:
        """A Python module in a process of its own, what it says in the row's log; `look` is called meanwhile."""
        with opened(folder / LOG, "ab") as log:
            log.write(f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            # A session of its own: Ctrl-C reaches the child through us, once, and not a second time by the terminal.
            words, environment = [sys.executable, "-m", *words], {**ENVIRONMENT, **os.environ}
            self._child = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=environment)
            if self.outcome.stopped:  # asked before there was a child to ask
                self._child.send_signal(signal.SIGTERM)
            while self._child.poll() is None:
                look()
                time.sleep(POLL)
        look()
        return self._child.returncode

    def _measure_speeds(self, rows: list[Row]) -> None:
        """Once for each row that has a finished run: seeds and learning rates do not matter. What could not be
        measured before is tried again."""
        chosen = {row.of or row.name for row in rows}
        finished: dict[str, list[Path]] = {}
        for row, seed in self.matrix.runs():
            if (row.of or row.name) in chosen and self._done(row, seed):
                finished.setdefault(row.of or row.name, []).append(run_folder(self.out, row.name, seed))
        for name, folders in finished.items():
            if self.outcome.stopped:
                break
            if not any(map(speed.is_measured, folders)):
                self._measure_speed(name, folders[0])

    def _measure_speed(self, name: str, run: Path) -> None:
        job = {
            "run": str(run), "device": self.device or "cuda", "fa3": self.fa3 and str(self.fa3),
            "tokens": speed.TOKENS, "parent": os.getpid(),
        }  # fmt: skip
        code = self._run_module(run.parent, ["gva.study.speed", json.dumps(job)])
        if self.outcome.stopped:
            return
        if code:
            speed.keep(run, {"reason": f"measuring it failed: {_ended(code)}"})
        if self.progress:
            print(f"{name}: decode speed {speed.told(run)}", flush=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the child for a checkpoint; asked again, it ends at once."""
        again = self.outcome.stopped
        self.outcome.stopped = True
        if self.progress and not again:
            print("\nstopping with a checkpoint; asked again, at once", file=sys.stderr, flush=True)
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)

    def _done(self, row: Row, seed: int) -> bool:
        """Whether nothing is left to do. A model may have been removed on purpose; a damaged one is exported again."""
        out = run_folder(self.out, row.name, seed)
        return is_done(out) and (not (out / MODEL).is_dir() or is_whole(out / MODEL))

    def _log_tail(self, row: Row, code: int) -> str:
        log = row_folder(self.out, row.name) / LOG
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LOG_TAIL:]
        return "\n".join([f"{_ended(code)}; the whole log: {log}", *lines])

    def _refuse_changes(self, runs: list[tuple[Row, int]]) -> None:
        train_set, valid_set = open_data(self.data), open_data(self.data, "valid")
        weights = {row.name: row.given() for row, _ in runs}
        for row, seed in runs:
            given = weights[row.name]
            config, recipe = row.build(self.matrix.preset, seed, self.vocab_size, given)
            given.check_fits(config, recipe, train_set)
            identity = identity_of(config, recipe, train_set, valid_set, given.fingerprints)
            refuse_another(run_folder(self.out, row.name, seed), identity, identity_defaults())


def _ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class Progress:
    """One bar over the steps of all runs: which run of how many, its loss, the time left; a line when one is done."""

    def __init__(
        self, preset: str, runs: list[tuple[Row, int]], pending: list[tuple[Row, int]], out: Path, active: bool
    ) -> None:
        self.active = active
        titles = [f"[{i}/{len(runs)}] {row.name} seed {seed}" for i, (row, seed) in enumerate(runs, 1)]
        self.titles = dict(zip((run_folder(out, row.name, seed) for row, seed in runs), titles, strict=True))
        self.steps = {run_folder(out, row.name, seed): row.recipe(preset, seed).steps for row, seed in pending}
        self.start = {run: max([line["step"] for line in _tail(run)], default=0) for run in self.steps}
        self.seen = dict(self.start)
        self.told: set[Path] = set()
        self.since = time.monotonic()
        if active and len(pending) < len(runs):
            print(f"{len(runs) - len(pending)} of {len(runs)} runs are done already", flush=True)
        # Off a terminal (a log, CI) a bar would be thousands of lines; there the line per run remains.
        shown = active and sys.stderr.isatty()
        self.bar = tqdm(total=sum(self.steps.values()) - sum(self.start.values()), unit="step", disable=not shown)

    def close(self) -> None:
        self.bar.close()

    def look(self, runs: list[Path]) -> None:
        """Read how far a row's runs have come."""
        for run in runs:
            if run in self.told:
                continue
            lines = _tail(run)
            step: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "step"), {})
            self.seen[run] = max(self.seen[run], step.get("step", 0))
            self.bar.set_description(self.titles[run], refresh=False)
            self.bar.set_postfix({"loss": f"{step['loss']:.3f}"} if step else {}, refresh=False)
            if not any(line["kind"] == "done" for line in lines):
                break
            self._tell(run)
        self.bar.n = sum(self.seen.values()) - sum(self.start.values())
        self.bar.refresh()

    def _tell(self, run: Path) -> None:
        self.told.add(run)
        evaluated = read_metrics(run, "eval")
        loss = f"validation loss {evaluated[-1]['valid_loss']:.4f}, " if evaluated else ""
        seconds, self.since = time.monotonic() - self.since, time.monotonic()
        if self.active:
            self.bar.write(f"{self.titles[run]}: {loss}{self.steps[run]} steps, {seconds:.0f} s", file=sys.stdout)
            sys.stdout.flush()


def _tail(run: Path) -> list[dict[str, Any]]:
    """The last lines a run has logged. Not the whole file: this is read four times a second."""
    path = run / METRICS
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        texts = file.read().splitlines()
    lines = []
    for text in texts:
        with suppress(ValueError):  # cut at its beginning, or still being written
            line = json.loads(text)
            lines += [line] if isinstance(line, dict) else []
    return lines
