"""`make faults`: every job ended at many of its file operations, run again, and compared with one that nobody ended.

A row of the CSV is written as a job is through, so that a stopped run keeps what it has; the table goes into
docs/reliability.md by `python studies/table.py`.
"""

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import gva
from faults.injector import FULL, KILL, Injector
from faults.jobs import JOBS, Trial, spread, write_inputs
from gva.run.folder import commit

FIELDS = ("job", "operations", "kills", "halfway", "disk_full", "lost", "seconds", "gva", "torch", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of each job at most, spread over its operations")
    parser.add_argument(
        "--full", type=int, default=40, help="tries of each job in which the disk is full from there on"
    )
    parser.add_argument("--job", action="append", help="these alone; repeatable")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.csv"))
    arguments = parser.parse_args()
    versions = {"gva": gva.__version__, "torch": torch.__version__, "commit": commit()}
    lost = 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, arguments.out.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        with Injector(Path(scratch)) as injector:
            inputs = write_inputs(injector, Path(scratch) / "inputs")
            for job in JOBS:
                if arguments.job and job.name not in arguments.job:
                    continue
                started = time.monotonic()
                trial = Trial(injector, job, inputs, Path(scratch) / job.name)
                kills = [(at, half, KILL) for at, half in spread(trial.operations, arguments.kills)]
                full = [(at, half, FULL) for at, half in spread(trial.operations, arguments.full)]
                wrong = 0
                for at, half, mode in tqdm([*kills, *full], desc=job.name, disable=not sys.stderr.isatty()):
                    if told := trial.fails_at(at, half, mode):
                        wrong += 1
                        how = "full disk" if mode == FULL else "killed"
                        print(f"{job.name}, {how} at operation {at}{', halfway' * half}: {told}", flush=True)
                found = {"job": job.name, "operations": trial.operations, "kills": len(kills)}
                found |= {"halfway": sum(half for _, half, _ in kills), "disk_full": len(full), "lost": wrong}
                table.writerow({**found, "seconds": round(time.monotonic() - started), **versions})
                file.flush()
                print(f"{job.name}: {len(kills)} kills, {len(full)} full disks, {wrong} lost", flush=True)
                lost += wrong
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
