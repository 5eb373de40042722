"""Launches that remember: Triton finds the compiled kernel anew at every launch, in more time than the launch takes."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

REMEMBERED = 1024  # sets of arguments of one kernel; a batch's size is among them


class Launcher:
    """A Triton kernel, called with its grid, its run-time arguments in order and, by name, its constants and options.

    All of a call that Triton may compile a variant for is part of the key: the device, constants and options, types of
    tensors and whether they are aligned, and all numbers as they are. Triton's settings (debugging, instrumentation)
    are those of the first such call. Nothing is remembered on AMD, where a tensor's size counts too, in the
    interpreter, or while torch.compile traces, which puts an op of its own in the place of the launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.remembers = hasattr(kernel, "cache_key") and torch.version.hip is None
        self.compiled: dict[tuple, tuple[Any, tuple]] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        if not self.remembers or torch.compiler.is_compiling():
            self.kernel[grid](*arguments, **named)
            return
        key = (
            driver.active.get_current_device(),
            *[(a.dtype, a.data_ptr() % 16) if isinstance(a, torch.Tensor) else a for a in arguments],
            *named.values(),
        )
        known = self.compiled.get(key)
        if known is not None:
            compiled, constants = known
            compiled[(*grid, 1, 1)](*arguments, *constants)
            return
        compiled = self.kernel[grid](*arguments, **named)
        if compiled is None:  # a hook of Triton's took it over
            return
        if len(self.compiled) >= REMEMBERED:
            self.compiled.clear()
        self.compiled[key] = compiled, tuple(named[name] for name in self.kernel.arg_names[len(arguments) :])
