"""Planning: once per step, on the device, for all layers.

A plan owns the buffers that the kernel needs beside its arguments. `update` refills them in place with one small
launch and reads nothing back, so a CUDA graph may contain it, and a graph captured at some lengths is valid at others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import dispatch
from .backend import select
from .call import Shape
from .config import Config, pick
from .layout import row_bytes
from .schedule import Work, allocate


@dataclass
class DecodePlan(Work):
    """Made by `plan_decode`. Valid for one shape; `paged_attention` refuses another."""

    shape: Shape
    uniform: bool

    def update(self, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> DecodePlan:
        """Refills the schedule from `seq_lens` [B] int32 (and the query counts of a ragged batch), in place."""
        if len(seq_lens) != self.shape.B:
            raise ValueError(f"seq_lens: got {len(seq_lens)} sequences, this plan was made for B={self.shape.B}")
        if self.uniform != (cu_seqlens_q is None):
            raise ValueError(
                "cu_seqlens_q: give it exactly if the plan was made with it "
                f"(made {'without' if self.uniform else 'with'})"
            )
        if self.split_tiles == 0:
            starts = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
            with torch.cuda.device_of(seq_lens):
                dispatch.fill(self, seq_lens.contiguous(), starts, self.shape.max_seqlen_q)
        return self

    def check(self, shape: Shape, uniform: bool) -> None:
        """Raises unless a call has the shape that the plan was made for."""
        for name, mine, got in zip(Shape._fields, self.shape, shape, strict=True):
            if mine != got:
                raise ValueError(f"plan: made for {name}={mine}, called with {name}={got}")
        if self.uniform != uniform:
            raise ValueError("plan: made for uniform query counts exactly if cu_seqlens_q is None")


def plan_decode(
    seq_lens: torch.Tensor,
    *,
    H: int,
    G: int,
    d_h: int,
    d_r: int,
    page: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype | None = None,
    max_seqlen_q: int = 1,
    cu_seqlens_q: torch.Tensor | None = None,
    split_tokens: int | None = None,
    max_tokens: int | None = None,
    row_stride: int | None = None,
    impl: str | None = None,
    config: Sequence[int] | None = None,
) -> DecodePlan:
    """A plan for `seq_lens` [B] int32 and queries of `dtype` [B, max_seqlen_q, H, d_h]; refill it with `plan.update`.

    split_tokens  cut every sequence into pieces of this many tokens, whatever else is in the batch: results are then
                  bitwise independent of the batch around a sequence (at the same max_seqlen_q). Needs `max_tokens`,
                  the longest sequence that will come. None: equal shares for all workers, the fastest.
    row_stride    elements from one token to the next, `value_pages.stride(1)`; None: G * d_h. That of a row with k_rope
                  (and scales) right behind the values says that the cache is made of such rows.
    impl          "triton", "cuda" (Hopper, tokens in rows), or None: whichever was measured to be faster.
    config        overrides the tuned configuration (`gva.ops.config.Config`); for benchmarks.
    """
    shape = Shape(len(seq_lens), H, G, d_h, d_r, page, dtype, value_dtype or dtype, max_seqlen_q)
    select(impl or "triton", seq_lens.device, dtype, shape.value_dtype)
    if H % G:
        raise ValueError(f"H={H}: must be a multiple of G={G}")
    if config is None:
        row_stride = row_stride or G * d_h
        in_rows = row_stride * shape.value_dtype.itemsize == row_bytes(shape.value_dtype, G, d_h, d_r)
        # A fixed split may not depend on the batch, and the tile of a single sequence is another one.
        tuned_for = shape if split_tokens is None else shape._replace(B=max(2, shape.B))
        chosen = pick(impl, seq_lens.device, tuned_for, row_stride, in_rows)
    else:
        chosen = Config(*config)
    split_tiles = 0
    if split_tokens is not None:
        if max_tokens is None:
            raise ValueError("max_tokens=None: a fixed split needs the longest sequence, to size its workspace")
        if split_tokens <= 0 or split_tokens % chosen.tile:
            raise ValueError(f"split_tokens={split_tokens}: must be a positive multiple of {chosen.tile}")
        split_tiles = split_tokens // chosen.tile
    work = allocate(chosen, seq_lens.device, shape, split_tiles, max_tokens or 0)
    plan = DecodePlan(**vars(work), shape=shape, uniform=cu_seqlens_q is None)
    return plan.update(seq_lens, cu_seqlens_q)
