"""The one place that chooses between implementations, and that joins two: whichever kernel reads a cache, Triton's plan
for it and merge what it read. Nothing is checked here; `impl` None chooses, as `backend.select` does."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from . import reference, sequences
from .backend import select
from .call import Batch, Call, Pages, Rotation, Shape
from .config import pick
from .layout import misfit
from .schedule import Variant, Work, allocate, grid_of


@functools.cache  # an import statement costs a microsecond even where the module is there
def _triton() -> Any:
    from . import triton

    return triton


@functools.cache
def _cuda() -> Any:
    from .cuda import read

    return read


@functools.cache
def _cpu() -> Any:
    from .cpu import read

    return read


def attend(call: Call, work: Work | None = None, impl: str | None = None) -> None:
    """Into `call.out` and `call.lse`; without `work` it is planned here."""
    values, device = call.pages.values, call.q_absorbed.device
    chosen = select(impl, device, call.q_absorbed.dtype, values.dtype, attends=True)
    if chosen == "cpu" and (impl is None or work is None):
        q, q_rope, pages, batch, scale, out, lse = call
        _cpu().attend(q, q_rope, values, pages.k_rope, values, batch, scale, out, lse)
        return
    if chosen == "reference":
        plain = sequences if impl is None and device.type == "cpu" and call.lse is None else reference
        plain.attend(call)
        return
    if work is None:
        shape = Shape.of(call)
        work = allocate(pick(impl, device, shape, values.stride(1), misfit(call.pages) is None), device, shape)
        fill(work, call.batch.seq_lens, call.batch.cu_seqlens_q, call.batch.max_seqlen_q)
    elif impl is not None and impl != work.config.impl:
        raise ValueError(f"plan: made for impl={work.config.impl!r}, called with impl={impl!r}")
    elif work.config.hopper and (lacking := misfit(call.pages)) is not None:
        raise ValueError(f"plan: made for a kernel that needs {lacking}")
    run(call, work)


def fill(work: Work, seq_lens: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int) -> None:
    """Cuts the work into shares, on the device."""
    _triton().attend.fill(work, seq_lens, cu_seqlens_q, max_seqlen_q)


def run(call: Call, work: Work) -> None:
    """By the kernels that the work was planned for."""
    grid = grid_of(work, call.batch.seq_lens.shape[0], call.batch.max_seqlen_q)
    if grid.units == 0 or call.q_absorbed.shape[0] == 0:
        return
    variant, kernels = Variant.of(call, work), _triton().attend
    read = _cuda().read if work.config.hopper else kernels.read
    read(call, work, variant, grid)
    kernels.merge(call, work, variant, grid)


def append(
    state: Tensor, k_rope: Tensor, pages: Pages, slots: Tensor, rotation: Rotation | None = None,
    impl: str | None = None,
) -> None:  # fmt: skip
    chosen = select(impl, state.device, state.dtype, pages.values.dtype)
    write = reference.append if chosen == "reference" else _triton().append.append
    write(state, k_rope, pages, slots, rotation)


def absorb(q: Tensor, maps: Tensor, impl: str | None = None) -> Tensor:
    chosen = select(impl, q.device, q.dtype, q.dtype)
    return (reference.absorb if chosen == "reference" else _triton().absorb.absorb)(q, maps)


def expand(
    values: Tensor, k_rope: Tensor, maps: Tensor, slots: Tensor | None = None, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    chosen = select(impl, values.device, values.dtype, values.dtype)
    return (reference.expand if chosen == "reference" else _triton().expand.expand)(values, k_rope, maps, slots)


def decode(
    q: Tensor, q_rope: Tensor | None, keys: Tensor, k_rope: Tensor | None, values: Tensor, batch: Batch,
    scale: float, mask: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """What `gva.ops.decode` knows to be impl="cpu"'s."""
    _cpu().attend(q, q_rope, keys, k_rope, values, batch, scale, out, None, mask)
