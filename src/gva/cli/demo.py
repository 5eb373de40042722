"""`gva demo`: what `make demo` shows."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    demo = commands.add_parser("demo", help="build every variant at a toy size, check it, measure its cache")
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.demo import run

    return run()
