"""Launches that remember: Triton finds the compiled kernel anew at every launch, in more time than the launch takes."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

REMEMBERED = 1024  # sets of arguments of one kernel
NUMBERS = {int, float, bool}
LARGEST_INT32 = 2**31 - 1


class Constants:
    """What a kernel is compiled for, and its options, by name. Hashed by identity, which is quick: make them once."""

    def __init__(self, **named: Any) -> None:
        self.named = named


class Remembered:
    """A Triton kernel, launched by calling it with its grid, its constants and its run-time arguments in order.

    All of a call that Triton may compile a variant for is part of the key: the device, the constants, types of tensors
    and whether they are aligned, and all numbers as they are, unless the kernel is not specialised for them. Triton's
    settings (debugging, instrumentation) are those of the first such call. Nothing is remembered on AMD, where a
    tensor's size counts too, in the interpreter, or while torch.compile traces, which puts an op of its own in the
    place of the launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.interpreted = not hasattr(kernel, "cache_key")  # by Triton's interpreter (TRITON_INTERPRET=1)
        self.remembers = not self.interpreted and torch.version.hip is None
        self.unspecialised = [p.num for p in kernel.params if p.do_not_specialize] if self.remembers else []
        self.compiled: dict[tuple, tuple[Any, tuple]] = {}

    def __call__(self, grid: tuple[int, ...], constants: Constants, *arguments: Any) -> None:
        if not self.remembers or torch.compiler.is_compiling():
            self.kernel[grid](*arguments, **constants.named)
            return
        kinds = [a if type(a) in NUMBERS else (a.dtype, a.data_ptr() % 16) for a in arguments]
        for i in self.unspecialised:
            kinds[i] = arguments[i] > LARGEST_INT32  # a wider type
        key = (driver.active.get_current_device(), constants, *kinds)
        known = self.compiled.get(key)
        if known is not None:
            compiled, values = known
            compiled[(*grid, 1, 1)](*arguments, *values)
            return
        compiled = self.kernel[grid](*arguments, **constants.named)
        if compiled is None:  # a hook of Triton's took it over
            return
        if len(self.compiled) >= REMEMBERED:
            self.compiled.clear()
        values = tuple(constants.named[name] for name in self.kernel.arg_names[len(arguments) :])
        self.compiled[key] = compiled, values
