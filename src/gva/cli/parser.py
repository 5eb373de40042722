"""Argument parsing with helpful errors."""

import argparse
from collections.abc import Callable
from typing import Any

from gva.errors import nearest


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that names the nearest option or choice when one is misspelt.

    `explain` gives text for the end of the help, when it is asked for: what it tells may be slow to load."""

    def __init__(self, *args: Any, explain: Callable[[], str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.explain = explain
        self.set_defaults(parser=self)  # of a command within a command, the innermost says so last

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is none of {allowed}{nearest(str(value), action.choices)}")

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.explain()}\n" if self.explain else "")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if hasattr(parsed, "overrides"):  # key=value words may stand between options, which argparse does not expect
            parsed.overrides += [word for word in unknown if "=" in word and not word.startswith("-")]
            unknown = [word for word in unknown if word not in parsed.overrides]
        if unknown:
            options = [option for action in parsed.parser._actions for option in action.option_strings]
            told = ", ".join(f"{name}{nearest(name.split('=')[0], options)}" for name in unknown)
            self.error(f"unknown argument {told}")
        return parsed
