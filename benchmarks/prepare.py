"""The most memory that `gva data prepare` takes, with the training of a BPE: for many documents, and for a single one.

    python benchmarks/prepare.py --csv benchmarks/results/prepare.csv

Words are drawn by Zipf's law, with numbers among them, as no two of which are alike the table of words grows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
        for _ in range(size // PART):
            drawn = rng.zipf(1.2, PART // 6) % len(words)
            text = " ".join(words[i] if i % 50 else str(rng.integers(10**9)) for i in drawn)
            file.write(json.dumps({"text": text}) + "\n" if lines else text + ". ")
        file.write("" if lines else '"}\n')


def peak(command: list[str]) -> tuple[float, float]:
    """MiB at most, and seconds. This process must be small: a child begins with the peak of its parent."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: ended with {process.returncode}")
    return used.ru_maxrss / 1024, time.perf_counter() - started


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
            words = [str(path), "--out", str(out), "--vocab-size", "2048", "--workers", "1"]
            mib, seconds = peak([sys.executable, "-m", "gva.cli", "data", "prepare", *words])
            rows.append({"form": form, "mb": size, "peak_mib": round(mib), "seconds": round(seconds)})
            print(rows[-1], flush=True)
    if arguments.csv:
        from timing import append_rows, environment

        append_rows(arguments.csv, [{**row, **environment(arguments.commit)} for row in rows])


if __name__ == "__main__":
    main()
