"""`gva bench`: the benchmarks of the source tree."""

import argparse
import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "benchmarks"
# What each cannot do without.
BENCHMARKS = {
    "decode": ("gpu", "triton"),
    "prefill": ("gpu", "triton"),
    "end-to-end": (),
    "train": (),
    "serving": ("vllm",),
    "fp8-error": (),
    "checkpoint": (),
    "prepare": (),
}
HOW_TO_GET = {
    "gpu": "an NVIDIA GPU that torch sees",
    "triton": "triton (pip install triton; it comes with torch for CUDA)",
    "vllm": "vLLM (docs/serving.md says which)",
}


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="run a benchmark of the source tree; what follows its name goes to it")
    bench.add_argument("name", nargs="?", choices=list(BENCHMARKS), help="without one: which there are")
    bench.add_argument("arguments", nargs=argparse.REMAINDER)
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"{FOLDER}: benchmarks come with the source tree, not with the package; clone it")
    if arguments.name is None:
        for name in BENCHMARKS:
            lacking = missing(name)
            print(f"{name:11s} {_what(name)}" + (f"\n{'':11s} missing here: {', '.join(lacking)}" if lacking else ""))
        print("gva bench NAME --help has the options of each")
        return 0
    lacking = missing(arguments.name)
    if lacking and not {"-h", "--help"} & set(arguments.arguments):
        raise OSError(f"{arguments.name} needs {' and '.join(lacking)}, which this machine lacks")
    return subprocess.run([sys.executable, str(_script(arguments.name)), *arguments.arguments]).returncode


def missing(name: str) -> list[str]:
    """What a benchmark needs and does not find here."""
    return [HOW_TO_GET[need] for need in BENCHMARKS[name] if not _here(need)]


def _here(need: str) -> bool:
    if need == "gpu":
        import torch

        return torch.cuda.is_available()
    return find_spec(need) is not None


def _script(name: str) -> Path:
    return FOLDER / f"{name.replace('-', '_')}.py"


def _what(name: str) -> str:
    """The first line of its docstring."""
    told = ast.get_docstring(ast.parse(_script(name).read_text(encoding="utf-8"))) or ""
    return told.partition("\n")[0]
