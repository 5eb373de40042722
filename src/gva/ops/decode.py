"""Decode steps on a CPU beside those of `paged_attention`: on pages of keys and values, and on caches of one tensor.

Who calls asks `takes` first: where it says no, plain torch does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch
from .backend import missing_cpu
from .call import Batch


def takes(q: Tensor, *cached: Tensor) -> bool:
    """Whether the kernel reads these: in eager steps outside training, where nothing records what torch computes."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    plain = all(type(x) is Tensor and x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, *cached))
    return plain and q.is_cpu and missing_cpu(q.device, q.dtype, q.dtype) is None


def pages(
    q: Tensor, q_rope: Tensor | None, keys: Tensor, k_rope: Tensor | None, values: Tensor, block_table: Tensor,
    seq_lens: Tensor, scale: float, out: Tensor,
) -> None:  # fmt: skip
    """One new token of every sequence, q [B, H, d_k] and q_rope [B, H, d_r], to pages of keys [P, page, G, d_k], k_rope
    [P, page, d_r] and values [P, page, G, d_v], into `out` [B, H, d_v]; table and lengths as in `paged_attention`."""
    dispatch.decode(q, q_rope, keys, k_rope, values, Batch(block_table, seq_lens, None, 1), scale, None, out)


def tensors(q: Tensor, q_rope: Tensor, values: Tensor, k_rope: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Absorbed queries [B, S, H, d_h] and [B, S, H, d_r] to values [B, T, G, d_h] and k_rope [B, T, d_r], any strides
    but the last: a cache is one page a sequence. Returns [B, S, H, d_h].

    mask  [B or 1, 1, S, T] bool: what is hidden is not read; None: the newest tokens are the queries, and see the rest
    """
    (B, S), T = q.shape[:2], values.shape[1]
    batch = Batch(torch.arange(B, dtype=torch.int32)[:, None], torch.full((B,), T, dtype=torch.int32), None, S)
    seen, out = None if mask is None else mask[:, 0].expand(B, S, T), torch.empty(q.shape, dtype=q.dtype)
    dispatch.decode(
        q.flatten(0, 1), q_rope.flatten(0, 1), values, k_rope, values, batch, scale, seen, out.flatten(0, 1)
    )
    return out
