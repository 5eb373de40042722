"""What checking costs a checkpoint and a model: the sums of their files beside writing and reading them.

    python benchmarks/checkpoint.py --preset paper-350m --csv benchmarks/results/checkpoint.csv

A checkpoint of weights and both moments of the optimizer is written and read as training does it, a model is loaded by
`from_pretrained`. What is written is summed once more by itself: `write_check` is that time over the whole of writing.
What is read is also read without its sums, in a random order: `*_check` is what they add, over the whole of reading,
from a disk and where the files lie in the cache of the file system. All are medians of some rounds.
"""

import argparse
import io
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import torch
from timing import append_rows, environment

from gva import GvaConfig, GvaForCausalLM
from gva.run.checkpoints import RECORD, Checkpoints
from gva.run.ranks import process_group
from gva.run.sums import checksum
from gva.weights import SUMS

READS = [(what, place) for what in ("checkpoint", "model") for place in ("disk", "memory")]


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def state_of(model: GvaForCausalLM) -> dict[str, torch.Tensor]:
    """Of the size that a checkpoint of GVA has in training."""
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    return {f"{kind}.{name}": torch.randn(shape) for kind in ("model", "exp_avg", "exp_avg_sq")
            for name, shape in shapes.items()}  # fmt: skip


def one_round(out: Path, step: int, state: dict[str, torch.Tensor], checkpoints: Checkpoints) -> dict[str, float]:
    def write() -> None:
        checkpoints.save(step, state)
        checkpoints.finish()

    folder = {"checkpoint": checkpoints.path(step), "model": out / "model"}
    record = {"checkpoint": folder["checkpoint"] / RECORD, "model": folder["model"] / SUMS}
    read = {
        "checkpoint": lambda: checkpoints.load(step, state),
        "model": lambda: GvaForCausalLM.from_pretrained(folder["model"]),
    }
    found = {"write": seconds(write)}
    written = [file for file in folder["checkpoint"].iterdir() if file.name != RECORD]
    found["write_check"] = seconds(lambda: [checksum(file, mapped=True) for file in written])
    calls = [(what, place, how) for what, place in READS for how in ("", "_unchecked")]
    for what, place, how in random.sample(calls, len(calls)):
        for file in folder[what].iterdir():
            (forget if place == "disk" else Path.read_bytes)(file)
        content = record[what].read_bytes()
        if how:
            record[what].unlink()
        with redirect_stderr(io.StringIO()):
            found[f"{what}_{place}{how}"] = seconds(read[what])
        record[what].write_bytes(content)
    return found


def forget(file: Path) -> None:
    """Let the next who reads it wait for the disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of a copy without git")
    arguments = parser.parse_args()
    out = Path(tempfile.mkdtemp(dir=arguments.out))
    try:
        model = GvaForCausalLM(GvaConfig.preset(arguments.preset))
        model.save_pretrained(out / "model")
        state = state_of(model)
        with process_group("cpu") as ranks:
            checkpoints = Checkpoints(out, {"seed": 0}, ranks, keep=1)
            rounds = [one_round(out, step, state, checkpoints) for step in range(1, arguments.rounds + 1)]
    finally:
        shutil.rmtree(out)
    middle = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    kinds = [f"{what}_{place}" for what, place in READS]
    row = {
        "preset": arguments.preset,
        "mib": round(sum(t.nbytes for t in state.values()) / 2**20),
        "rounds": arguments.rounds,
        **{f"{name}_s": f"{middle[name]:.4f}" for name in ("write", *kinds)},
        "write_check": f"{middle['write_check'] / middle['write']:.4f}",
        **{f"{name}_check": f"{1 - middle[f'{name}_unchecked'] / middle[name]:.4f}" for name in kinds},
        **environment(arguments.commit),
    }
    print(row)
    if arguments.csv:
        append_rows(arguments.csv, [row])


if __name__ == "__main__":
    main()
