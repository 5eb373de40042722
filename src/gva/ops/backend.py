"""Which implementation runs: declared abilities, refused at selection with the reason."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

IMPLEMENTATIONS = ("reference", "triton", "cuda", "cpu")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU_DTYPES = (torch.float32, torch.bfloat16)
FP8 = torch.float8_e4m3fn


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def missing(device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype) -> str | None:
    """What the Triton kernels lack here, or None."""
    if not _triton_installed():
        return "the package triton, which is not installed (pip install triton)"
    if dtype not in KERNEL_DTYPES:
        return f"queries of {', '.join(str(d) for d in KERNEL_DTYPES)}; got {dtype}"
    if device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu":
            return None
        return f"a GPU, or TRITON_INTERPRET=1 for CPU tensors; got tensors on {device}"
    if torch.version.hip is not None:
        return "an NVIDIA GPU of sm89 or newer for fp8 values" if value_dtype == FP8 else None
    capability = _capability(device.index or 0)
    needed = (8, 9) if value_dtype == FP8 else (8, 0)
    if capability < needed:
        return (f"compute capability {needed[0]}.{needed[1]} or newer for values of {value_dtype}; "
                f"this GPU has {capability[0]}.{capability[1]}")  # fmt: skip
    return None


@functools.cache
def missing_hopper(device: torch.device) -> str | None:
    """What impl="cuda" lacks here beyond what "triton" does, or None."""
    if device.type != "cuda" or torch.version.hip is not None or _capability(device.index or 0) != (9, 0):
        return f"a GPU of compute capability 9.0; got tensors on {device}"
    from .cuda import compile

    try:
        compile.nvrtc(), compile.driver()
    except OSError as error:
        return str(error)
    return None


def missing_cpu(device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype) -> str | None:
    """What impl="cpu" lacks here, or None."""
    if device.type != "cpu":
        return f"tensors on a CPU; got tensors on {device}"
    if dtype not in CPU_DTYPES or value_dtype != dtype:
        return f"queries and values of float32, or both of bfloat16; got {dtype} and {value_dtype}"
    from .cpu import compile

    return compile.missing()


def select(
    impl: str | None, device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype, attends: bool = False
) -> str:
    """None: kernels that can run on the device, reference elsewhere. A name: that one, or an error; never another.

    Both "triton" and "cuda" plan and merge in Triton; which of their kernels reads the cache is `config.pick`'s choice.
    "cpu" has a kernel for what `attends` to a cache alone.
    """
    if impl is None:
        if attends and missing_cpu(device, dtype, value_dtype) is None:
            return "cpu"
        on_gpu = device.type == "cuda" and missing(device, dtype, value_dtype) is None
        return "triton" if on_gpu else "reference"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: allowed are None, {', '.join(repr(i) for i in IMPLEMENTATIONS)}")
    if impl == "cpu" and not attends:
        raise ValueError("impl='cpu': attends to a cache without a plan, and has no kernel for this; give impl=None")
    if impl != "reference":
        lacking = (missing_cpu if impl == "cpu" else missing)(device, dtype, value_dtype)
        if lacking is not None:
            raise RuntimeError(f"impl={impl!r} needs {lacking}; impl='reference' runs anywhere")
    return impl
