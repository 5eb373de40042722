"""The most memory that `gva data prepare` takes, with the training of a BPE: for many documents, and for a single one.

    python benchmarks/prepare.py --csv benchmarks/results/prepare.csv

Words are drawn by Zipf's law, with numbers among them, as no two of which are alike the table of words grows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

PART = 4000  # bytes


def write(path: Path, size: int, lines: bool) -> None:
    """A jsonl of about so many bytes: a line for each 4 kB, or one line."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 11))) for _ in range(100_000)]
    with path.open("w") as file:
        file.write("" if lines else '{"text": "')
        while file.tell() < size:
            drawn = rng.zipf(1.2, PART // 6) % len(words)
            text = " ".join(words[i] if i % 50 else str(rng.integers(10**9)) for i in drawn)
            file.write(json.dumps({"text": text}) + "\n" if lines else text + ". ")
        file.write("" if lines else '"}\n')


def peak(command: list[str]) -> tuple[float, float]:
    """The most memory in MB that the processes of a command take together, and seconds. At each look a process counts
    with the most that it has taken so far, and pages that two share count twice: rather too much than too little."""
    started, most = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        most = max(most, sum(map(taken, family(process.pid))))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{command}: ended with {process.returncode}")
    return most / 1e6, time.perf_counter() - started


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    found = [process]
    for parent in found:
        with suppress(OSError):  # it has ended
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def taken(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--line", type=float, default=100, help="MB of a document on one line")
    parser.add_argument("--lines", type=float, default=200, help="MB of many documents")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of a copy without git")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for form, size in (("one line", arguments.line), ("lines", arguments.lines)):
            path, out = Path(scratch) / "a.jsonl", Path(scratch) / form.replace(" ", "-")
            write(path, int(size * 1e6), form == "lines")
            words = ["data", "prepare", str(path), "--out", str(out)]
            mb, seconds = peak([sys.executable, "-m", "gva.cli", *words])
            rows.append({"form": form, "mb": size, "peak_mb": round(mb), "seconds": round(seconds)})
            print(rows[-1], flush=True)
    if arguments.csv:
        from timing import append_rows, environment

        append_rows(arguments.csv, [{**row, **environment(arguments.commit)} for row in rows])


if __name__ == "__main__":
    main()
