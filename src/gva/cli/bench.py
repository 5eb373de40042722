"""`gva bench`: the benchmarks of the source tree."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="run a benchmark of the source tree; what follows its name goes to it")
    bench.add_argument("name", choices=["decode", "end-to-end", "prefill", "train"])
    bench.add_argument("arguments", nargs=argparse.REMAINDER)
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    script = Path(__file__).parents[3] / "benchmarks" / f"{arguments.name.replace('-', '_')}.py"
    if not script.is_file():
        raise FileNotFoundError(f"{script}: benchmarks come with the source tree, not with the package; clone it")
    return subprocess.run([sys.executable, str(script), *arguments.arguments]).returncode
