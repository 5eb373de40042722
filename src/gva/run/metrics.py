"""What a run leaves behind: metrics.jsonl, one line per step or event, TensorBoard, and a live line."""

import json
import lzma
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from gva.run.atomic import write_atomically
from gva.run.board import Board, open_board
from gva.run.files import FolderError, opened

METRICS = "metrics.jsonl"
KEPT = f"{METRICS}.xz"  # of a run that nobody trains any more and that is kept small
# Dense bf16 rates by the vendors' datasheets, for the share of them that training reaches.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


class NonFiniteLoss(ArithmeticError):
    """Training cannot go on; says at which step, on which data, and what to try."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Metrics:
    """Collects tensors without waiting for them; `flush` brings a window of steps to the host at once."""

    def __init__(self, out: Path, resumed_at: int, steps: int, active: bool, progress: bool) -> None:
        self.path, self.active = out / METRICS, active
        self.window: list[tuple[dict[str, float], dict[str, Tensor]]] = []
        self.started = time.perf_counter()
        self.bar = tqdm(total=steps, initial=resumed_at, unit="step", disable=not (active and progress))
        self.board: Board | None = None
        if active:
            _keep_until(self.path, resumed_at)
            self.board = open_board(out, resumed_at + 1)

    def step(self, step: int, scalars: dict[str, Tensor], **plain: float) -> None:
        """Remember a step; `scalars` stay on their device."""
        self.window.append(({"step": step, **plain}, scalars))

    def event(self, kind: str, step: int, found: dict[str, Any]) -> None:
        """Write what was found at a step."""
        self.write([{"kind": kind, "step": step, **found}])

    def flush(self, tokens_per_step: int, flops_per_token: float, devices: int) -> None:
        """Write the window. Raises NonFiniteLoss if a loss or norm in it is not a number."""
        if not self.window:
            return
        plain, scalars = zip(*self.window, strict=True)
        rows = torch.stack([torch.stack([t.double().reshape(()) for t in step.values()]) for step in scalars]).tolist()
        now = time.perf_counter()
        rate = tokens_per_step * len(rows) / (now - self.started)
        self.started = now
        usage = {"tokens_per_second": rate, **_device_usage(rate, flops_per_token, devices)}
        lines: list[dict[str, Any]] = [
            {"kind": "step", **known, **dict(zip(step, row, strict=True)), **usage}
            for known, step, row in zip(plain, scalars, rows, strict=True)
        ]
        self.window = []
        self.write(lines)
        for line in lines:
            if not math.isfinite(line["loss"]) or not math.isfinite(line["grad_norm"]):
                told = f"loss {line['loss']}, gradient norm {line['grad_norm']} at step {line['step']}"
                raise NonFiniteLoss(told, line["step"])
        self.bar.n = lines[-1]["step"]
        shown = {"loss": f"{lines[-1]['loss']:.4f}", "tok/s": f"{rate:,.0f}"}
        if "mfu" in usage:
            shown["MFU"] = f"{usage['mfu']:.1%}"
        self.bar.set_postfix(shown)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Append lines, whole ones only, and mirror their numbers to TensorBoard."""
        if not self.active:
            return
        try:
            with opened(self.path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            if self.board is not None:
                self.board.write(lines)
        except OSError as error:
            raise OSError(
                f"{self.path}: could not be written ({error}); make room and run the same command again, it goes on "
                "from the last whole checkpoint"
            ) from error

    def restart_clock(self) -> None:
        """What was not training (evaluation, writing) does not count against its speed."""
        self.started = time.perf_counter()

    def close(self) -> None:
        self.bar.close()
        if self.board is not None:
            self.board.close()


def read_metrics(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics, of one kind or all. A last line cut short by a kill is left out; so is one that was
    damaged since, with a warning."""
    path = _where(out)
    lines, damaged = _lines(path)
    for number in damaged:
        warnings.warn(f"{path}: line {number} is damaged and left out; copy the file again", stacklevel=2)
    return [line for line in lines if kind is None or line["kind"] == kind]


def is_damaged(out: Path) -> bool:
    """Whether lines of a run's metrics are lost, any of which may have been the one that says it is done."""
    return bool(_lines(_where(out))[1])


def _lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines, and the numbers of those that are damaged."""
    texts = _content(path).splitlines(keepends=True)
    found = [_parsed(text) for text in texts]
    damaged = [i for i, text in enumerate(texts, 1) if found[i - 1] is None and text.endswith(b"\n")]
    return [line for line in found if line is not None], damaged


def _content(path: Path) -> bytes:
    content = path.read_bytes() if path.is_file() else b""
    try:
        return lzma.decompress(content) if path.name == KEPT else content
    except lzma.LZMAError as error:
        raise FolderError(f"{path}: damaged ({error}); copy it again") from None


def _parsed(text: bytes) -> dict[str, Any] | None:
    """A line of metrics, if it is one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    fine = isinstance(line, dict) and isinstance(line.get("kind"), str) and isinstance(line.get("step"), int)
    return line if fine else None


def record(out: Path, line: dict[str, Any]) -> None:
    """Add a line to the metrics of a run that nobody trains, in place of one of its kind and step."""
    kept = [old for old in read_metrics(out) if (old["kind"], old["step"]) != (line["kind"], line["step"])]
    _replace(_where(out), [*kept, line])


def keep(out: Path, lines: list[dict[str, Any]]) -> None:
    """Leave these as the metrics of a run, compressed."""
    _replace(out / KEPT, lines)
    (out / METRICS).unlink(missing_ok=True)


def is_done(out: Path) -> bool:
    return bool(read_metrics(out, "done"))


def _keep_until(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint that a run goes on from, without one everything: it will be logged
    again."""
    kept = [line for line in read_metrics(path.parent) if 0 < step >= line["step"] and line["kind"] != "done"]
    _replace(path, kept)


def _where(out: Path) -> Path:
    return out / KEPT if (out / KEPT).is_file() and not (out / METRICS).is_file() else out / METRICS


def _replace(path: Path, lines: list[dict[str, Any]]) -> None:
    content = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(path, lzma.compress(content.encode(), preset=9) if path.name == KEPT else content)


def _device_usage(rate: float, flops_per_token: float, devices: int) -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    usage = {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    peak = next((p for name, p in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    if peak is not None:
        usage["mfu"] = rate * flops_per_token / (peak * devices)
    return usage
