"""`make faults`: every job ended at many of its file operations, run again, and compared with one that nobody ended.

The row of a job in the CSV is kept up to date, so that a stopped sweep counts what it did, and those of others stay;
`python benchmarks/table.py` puts the table into docs/reliability.md.
"""

import argparse
import csv
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import gva
from faults.injector import FULL, KILL, Injector
from faults.jobs import JOBS, Trial, spread, write_inputs
from gva.run.folder import commit

COUNTS = ("kills", "halfway", "twice", "disk_full", "lost", "seconds")
FIELDS = ("job", "operations", *COUNTS, "gva", "gpu", "torch", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of each job at most, spread over its operations")
    parser.add_argument("--full", type=int, default=40, help="tries of each job with a disk full from there on")
    parser.add_argument("--job", action="append", help="these alone; repeatable")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.csv"))
    arguments = parser.parse_args()
    versions = {"gva": gva.__version__, "gpu": "cpu", "torch": torch.__version__, "commit": commit()}
    lost = 0
    with tempfile.TemporaryDirectory() as scratch, Injector(Path(scratch)) as injector:
        inputs = write_inputs(injector, Path(scratch) / "inputs")
        for job in JOBS:
            if arguments.job and job.name not in arguments.job:
                continue
            trial = Trial(injector, job, inputs, Path(scratch) / job.name.replace(" ", "-"))
            for found in sweep(trial, arguments.kills, arguments.full):
                keep(arguments.out, {"job": job.name, "operations": trial.operations, **found, **versions})
            print(
                f"{job.name}: {found['kills']} kills, {found['disk_full']} full disks, {found['lost']} lost", flush=True
            )
            lost += found["lost"]
    return 1 if lost else 0


def sweep(trial: Trial, most: int, full: int) -> Iterator[dict[str, int]]:
    """Kills, and full disks, over all operations of a job in any order: how many so far, how many lost something."""
    started, rng = time.monotonic(), random.Random(0)
    # Of every second one the try after it is killed too, wherever that happens to be.
    kills = [
        (at, half, KILL, rng.randint(1, trial.operations) if number % 2 else 0)
        for number, (at, half) in enumerate(spread(trial.operations, most))
    ]
    tries = [*kills, *((at, half, FULL, 0) for at, half in spread(trial.operations, full))]
    rng.shuffle(tries)
    found = dict.fromkeys(COUNTS, 0)
    for at, half, mode, then in tqdm(tries, desc=trial.job.name, disable=not sys.stderr.isatty()):
        killed = mode == KILL
        if told := trial.fails_at(at, half, mode, then):
            found["lost"] += 1
            how = "killed" if killed else "full disk"
            print(f"{trial.job.name}, {how} at operation {at}{', halfway' * half}, then {then}: {told}", flush=True)
        found["kills"] += killed * (1 + (then > 0))
        found["halfway"] += killed * half
        found["twice"] += then > 0
        found["disk_full"] += not killed
        yield found | {"seconds": round(time.monotonic() - started)}


def keep(path: Path, row: dict[str, Any]) -> None:
    """In a CSV of a row for each job, in their order."""
    rows = {}
    if path.is_file():
        with path.open(newline="") as file:
            rows = {old["job"]: old for old in csv.DictReader(file)}
    rows[row["job"]] = row
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[job.name] for job in JOBS if job.name in rows)


if __name__ == "__main__":
    sys.exit(main())
