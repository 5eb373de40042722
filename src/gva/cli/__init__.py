"""The command `gva`: one file per command, each of which parses, calls and prints."""

import sys
from collections.abc import Sequence

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
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has gone: not our error
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        print(f"gva {arguments.command}: {printable(str(error))}", file=sys.stderr)
        return 2
