"""Messages that name the argument, its value and what is allowed."""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def nearest(name: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the option closest to a misspelt name, or nothing."""
    match = get_close_matches(name, list(options), n=1, cutoff=cutoff)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_choice(argument: str, value: Any, allowed: Iterable[Any], why: str = "") -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    allowed = list(allowed)
    if value not in allowed:
        hint = nearest(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
        reason = f" ({why})" if why else ""
        raise ValueError(f"{argument}={value!r}: must be one of {allowed}{reason}{hint}")


def check(condition: bool, argument: str, value: Any, rule: str) -> None:
    """Raise ValueError that names the argument and its value unless `condition` holds."""
    if not condition:
        raise ValueError(f"{argument}={value!r}: {rule}")


def check_finite(what: str, values: Iterable[float], remedy: str) -> None:
    """Raise ArithmeticError unless all values are numbers: what is none never becomes a result."""
    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        raise ArithmeticError(f"{what} {wrong[0]} instead of a number; {remedy}")
