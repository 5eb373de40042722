"""Room on the interpreter's stack.

CPython keeps frames in chunks of 16 KiB. It maps a new chunk for a call that does not fit into the last one and unmaps
it when that call returns, so a loop whose calls happen to cross the line pays two system calls and a page fault at each
of them: 7 to 14 us instead of 0.04 in a loop of empty calls, on 3.11 to 3.13. How deep an engine is in its own calls
when it reaches a layer nobody controls; in vLLM 0.25.1, looked at once by hand, a step that reads prompts had 520 page
faults, with this 45. For a frame that is larger than a chunk gets a chunk as large as it needs, rounded up to a power
of two, and what it leaves over is room for all calls below it.
"""

from collections.abc import Callable
from typing import Any

SLOTS = 4200  # of 8 bytes: a chunk of 64 KiB, half of it free

_names = " = ".join(f"_{i}" for i in range(SLOTS))
_scope: dict[str, Any] = {}
exec(
    f"def roomy(function, *arguments):\n    if False:\n        {_names} = None\n    return function(*arguments)", _scope
)

roomy: Callable[..., Any] = _scope["roomy"]
"""function(*arguments), with 30 KiB of stack below it that need no mapping."""
