"""Planning: once per step, on the device, for all layers.

A plan owns the buffers that the kernel needs beside its arguments. `update` refills them in place with one small
launch and reads nothing back, so a CUDA graph may contain it, and a graph captured at some lengths is valid at others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from .backend import select


@dataclass
class DecodePlan:
    """Made by `plan_decode`. Valid for one shape; `paged_attention` refuses another."""

    shape: dict
    config: list[int]
    split_tiles: int  # > 0: fixed pieces of that many tiles, independent of the batch
    uniform: bool
    schedule: torch.Tensor
    part_out: torch.Tensor
    part_lse: torch.Tensor

    def update(self, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> DecodePlan:
        """Refills the schedule from `seq_lens` [B] int32 (and the query counts of a ragged batch), in place."""
        if len(seq_lens) != self.shape["B"]:
            raise ValueError(f"seq_lens: got {len(seq_lens)} sequences, this plan was made for B={self.shape['B']}")
        if self.uniform != (cu_seqlens_q is None):
            raise ValueError(
                "cu_seqlens_q: give it exactly if the plan was made with it "
                f"(made {'without' if self.uniform else 'with'})"
            )
        if self.split_tiles == 0:
            launch, config, workspace = self._launcher
            seq_lens, starts = seq_lens.contiguous(), None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
            with torch.cuda.device_of(seq_lens):
                launch.fill_schedule(config, workspace, seq_lens, starts, self.shape["max_seqlen_q"])
        return self

    @functools.cached_property
    def _launcher(self) -> tuple[Any, Any, Any]:
        from .config import Config
        from .triton import launch

        return launch, Config(*self.config), launch.Workspace(self.schedule, self.part_out, self.part_lse)

    def check(self, **shape) -> None:
        """Raises unless the call has the shape that the plan was made for."""
        for name, value in shape.items():
            if self.shape[name] != value:
                raise ValueError(f"plan: made for {name}={self.shape[name]}, called with {name}={value}")


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
    config: list[int] | None = None,
) -> DecodePlan:
    """A plan for `seq_lens` [B] int32 and queries of `dtype` [B, max_seqlen_q, H, d_h]; refill it with `plan.update`.

    split_tokens  cut every sequence into pieces of this many tokens, whatever else is in the batch: results are then
                  bitwise independent of the batch around a sequence (at the same max_seqlen_q). Needs `max_tokens`,
                  the longest sequence that will come. None: equal shares for all workers, the fastest.
    row_stride    elements from one token to the next, `value_pages.stride(1)`; None: G * d_h. That of a row with k_rope
                  (and scales) right behind the values says that the cache is made of such rows.
    impl          "triton", "cuda" (Hopper, tokens in rows), or None: whichever was measured to be faster.
    config        overrides the tuned configuration (`gva.ops.config.Config.ints`); for benchmarks.
    """
    value_dtype = dtype if value_dtype is None else value_dtype
    select(impl or "triton", seq_lens.device, dtype, value_dtype)
    if H % G:
        raise ValueError(f"H={H}: must be a multiple of G={G}")
    from .config import Config, pick, row_bytes
    from .triton import launch

    row_stride = row_stride or G * d_h
    chosen = (
        Config(*config)
        if config
        else pick(
            impl,
            seq_lens.device,
            dtype,
            value_dtype,
            G=G,
            R=H // G,
            d_h=d_h,
            d_r=d_r,
            page=page,
            max_seqlen_q=max_seqlen_q,
            # A fixed split may not depend on the batch, and the tile of a single sequence is another one.
            B=len(seq_lens) if split_tokens is None else max(2, len(seq_lens)),
            row_stride=row_stride,
            in_rows=row_stride * value_dtype.itemsize == row_bytes(value_dtype, G, d_h, d_r),
        )
    )
    split_tiles = 0
    if split_tokens is not None:
        if max_tokens is None:
            raise ValueError("max_tokens=None: a fixed split needs the longest sequence, to size its workspace")
        if split_tokens <= 0 or split_tokens % chosen.tile:
            raise ValueError(f"split_tokens={split_tokens}: must be a positive multiple of {chosen.tile}")
        split_tiles = split_tokens // chosen.tile
    workspace = launch.allocate(
        chosen,
        seq_lens.device,
        B=len(seq_lens),
        G=G,
        R=H // G,
        d_h=d_h,
        max_seqlen_q=max_seqlen_q,
        split_tiles=split_tiles,
        max_tokens=max_tokens or 0,
    )
    shape = {
        "B": len(seq_lens),
        "H": H,
        "G": G,
        "d_h": d_h,
        "d_r": d_r,
        "page": page,
        "dtype": dtype,
        "value_dtype": value_dtype,
        "max_seqlen_q": max_seqlen_q,
    }
    plan = DecodePlan(
        shape,
        chosen.ints(),
        split_tiles,
        cu_seqlens_q is None,
        workspace.schedule,
        workspace.part_out,
        workspace.part_lse,
    )
    return plan.update(seq_lens, cu_seqlens_q)
