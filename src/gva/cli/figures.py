"""`gva figures`: pictures that need no training."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    figures = commands.add_parser("figures", help="draw the pictures that need no training")
    actions = figures.add_subparsers(dest="action", required=True, metavar="ACTION")
    scale = actions.add_parser("scale", help="attention at matched, too small and too large scales of queries and keys")
    scale.add_argument("--out", type=Path, default=Path("figures"), help="folder for the SVG files")
    scale.set_defaults(run=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    from gva.report.scale import write_figures

    for path in write_figures(arguments.out):
        print(path)
    return 0
