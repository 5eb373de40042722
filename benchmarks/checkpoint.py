"""What checking costs a checkpoint: the sums of its files beside writing and reading them.

    python benchmarks/checkpoint.py --preset paper-350m --csv benchmarks/results/checkpoint.csv

A checkpoint of weights and both moments of the optimizer is written and read as training does it, and summed once more
by itself, as it is after writing and before reading. `write_check` and `read_check` are that time over the whole of
writing and of reading, the median of some rounds. Reading finds the file in the cache of the file system, where a check
costs the largest part of it.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import append_rows, environment

from gva import GvaConfig, GvaForCausalLM
from gva.run.checkpoints import RECORD, Checkpoints
from gva.run.ranks import process_group
from gva.run.storage import checksum


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def state_of(preset: str) -> dict[str, torch.Tensor]:
    """Of the size that a checkpoint of GVA has in training."""
    with torch.device("meta"):
        model = GvaForCausalLM(GvaConfig.preset(preset))
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    return {f"{kind}.{name}": torch.randn(shape) for kind in ("model", "exp_avg", "exp_avg_sq")
            for name, shape in shapes.items()}  # fmt: skip


def one_round(out: Path, step: int, state: dict[str, torch.Tensor], checkpoints: Checkpoints) -> dict[str, float]:
    def write() -> None:
        checkpoints.save(step, state)
        checkpoints.finish()

    def check(mapped: bool) -> None:
        for file in checkpoints.path(step).iterdir():
            if file.name != RECORD:
                checksum(file, mapped)

    return {
        "write": seconds(write),
        "check_written": seconds(lambda: check(True)),
        "check_read": seconds(lambda: check(False)),
        "read": seconds(lambda: checkpoints.load(step, state)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of a copy without git")
    arguments = parser.parse_args()
    out = Path(tempfile.mkdtemp(dir=arguments.out))
    try:
        state = state_of(arguments.preset)
        with process_group("cpu") as ranks:
            checkpoints = Checkpoints(out, {"seed": 0}, ranks, keep=1)
            rounds = [one_round(out, step, state, checkpoints) for step in range(1, arguments.rounds + 1)]
    finally:
        shutil.rmtree(out)
    middle = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    shares = {
        "write_check": [found["check_written"] / found["write"] for found in rounds],
        "read_check": [found["check_read"] / found["read"] for found in rounds],
    }
    row = {
        "preset": arguments.preset,
        "mib": round(sum(t.nbytes for t in state.values()) / 2**20),
        "rounds": arguments.rounds,
        **{f"{name}_s": f"{value:.4f}" for name, value in middle.items()},
        **{name: f"{statistics.median(found):.4f}" for name, found in shares.items()},
        **environment(arguments.commit),
    }
    print(row)
    if arguments.csv:
        append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
