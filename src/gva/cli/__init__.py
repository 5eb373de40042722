"""The command `gva`: one file per command, each of which parses, calls and prints."""

import errno
import os
import sys
from collections.abc import Sequence

import gva
from gva.cli import (
    bench,
    chat,
    check,
    compare,
    convert,
    cost,
    data,
    evaluate,
    figures,
    generate,
    importing,
    report,
    serve,
    train,
)
from gva.cli.parser import Parser
from gva.text import printable

# Threads that spin while they wait for one another stall on cores that other work shares. Read when torch is loaded.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
FULL = (errno.ENOSPC, errno.EDQUOT)
COMMANDS = (
    cost,
    data,
    train,
    evaluate,
    compare,
    report,
    figures,
    generate,
    importing,
    convert,
    serve,
    chat,
    bench,
    check,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="gva", description="Grouped Value Attention: a KV cache of values and one small key.")
    parser.add_argument("--version", action="version", version=f"gva {gva.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(argv)
    os.environ.update({**PASSIVE, **os.environ})
    try:
        if getattr(arguments, "device", None) == "cuda":
            _check_gpu()
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has gone: not our error
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        told = str(error)
        if getattr(error, "errno", None) in FULL and "make room" not in told:
            told += "; make room and run the same command again"
        print(f"gva {arguments.command}: {printable(told)}", file=sys.stderr)
        return 2


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device='cuda': torch sees no NVIDIA GPU here; leave it out to run on the CPU")
