"""Timing with CUDA graphs over rotated buffers, and the append-only table of results."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import pathlib
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_CALLS = 8


@dataclass
class Timing:
    """Microseconds per call: median and the 20th and 80th percentile over replays."""

    median: float
    p20: float
    p80: float


def rotation(bytes_per_call: int, device: int = 0) -> int:
    """How many copies of the inputs make one pass over them at least three times the L2 cache."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, -(-3 * l2 // max(bytes_per_call, 1)))


def time_calls(calls: Sequence[Callable[[], object]], target_ms: float = 40.0, max_replays: int = 200) -> Timing:
    """All `calls` (one per copy of the inputs) captured in one graph, which is replayed until `target_ms` is spent.

    Few calls are repeated within the graph: the pause between two graph launches is not the kernel's.
    """
    calls = list(calls) * -(-MIN_CALLS // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = int(min(max_replays, max(7, target_ms / max(begin.elapsed_time(end), 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(b.elapsed_time(e) * 1e3 / len(calls) for b, e in events)
    return Timing(statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5])


def environment(commit: str | None = None) -> dict[str, str]:
    """What a number depends on besides the code, and the code: a copy without git is told its commit."""
    if commit is None:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton,
        "commit": commit,
    }


def append_rows(path: pathlib.Path, rows: list[dict]) -> None:
    """Adds rows to the table; a column that the table does not have is an error, a missing one is left empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            columns = next(csv.reader(file))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)
