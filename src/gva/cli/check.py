"""`gva check`: whether this installation computes what it should."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    check = commands.add_parser("check", help="build every variant at a toy size, check it, measure its cache")
    check.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.check import run

    return run()
