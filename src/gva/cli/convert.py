"""`gva convert`: a smaller cache for a trained model."""

import argparse
from inspect import signature
from pathlib import Path
from typing import Any

from gva.convert import TARGETS


def add(commands: Any) -> None:
    parser = commands.add_parser("convert", help="a trained model with grouped-query attention, with a smaller cache")
    parser.add_argument("source", type=Path, help="a folder that gva import or gva train wrote")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    targets = "; ".join(f"{name}: {about}" for name, about in TARGETS.items())
    parser.add_argument("--to", default="gva", choices=list(TARGETS), help=targets)
    parser.add_argument("--cache", required=True, help="scalars per token and layer, or percent of the source's: 54%%")
    parser.add_argument(
        "--calibrate", nargs="+", type=Path, required=True, help="text that the model should do well on"
    )
    parser.add_argument("--held-out", nargs="+", type=Path, default=[], help="text to report on; else some of the same")
    parser.add_argument("--tokens", type=int, default=100_000, help="of text to calibrate on (100000)")
    parser.add_argument("--length", type=int, default=512, help="of a sequence, in tokens (512)")
    parser.add_argument("--search-tokens", type=int, default=16_384, help="that each step of the search is judged by")
    parser.add_argument("--slice", type=int, help="how much of the cache rotates, instead of a search")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.convert.job import convert

    given = dict(vars(arguments))
    record = convert(**{name: given[name] for name in signature(convert).parameters})
    print("\n".join(record.lines()))
    print(f"{arguments.out}: heal it with gva train --from {arguments.out} --teacher {arguments.source}")
    return 0
