"""What a call is made of. Named tuples, since an engine makes them at every layer of every step; nothing is checked."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Pages(NamedTuple):
    """The cache of one layer, P pages of `page` tokens; any strides, the last dimension contiguous.

    values  [P, page, G, d_h]  in the dtype of the queries, or float8_e4m3fn
    k_rope  [P, page, d_r]     beside fp8 values bfloat16
    scales  [P, page, G]       of fp8 values alone, float32: value = e4m3 * scale
    """

    values: Tensor
    k_rope: Tensor
    scales: Tensor | None = None


class Batch(NamedTuple):
    """Which pages and which queries are whose; as in `api.paged_attention`."""

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int

    @property
    def uniform(self) -> int:
        """Queries of every sequence; 0 where they differ."""
        return self.max_seqlen_q if self.cu_seqlens_q is None else 0


class Call(NamedTuple):
    """One attention: queries [N, H, d_h] and [N, H, d_r], what they attend to, and where the result goes."""

    q_absorbed: Tensor
    q_rope: Tensor
    pages: Pages
    batch: Batch
    scale: float
    out: Tensor  # [N, H, d_h]
    lse: Tensor | None  # [N, H]

    @property
    def scale_log2(self) -> float:
        """For kernels, which know powers of two."""
        return self.scale * LOG2_E


class Shape(NamedTuple):
    """What a kernel is chosen for, and a plan made."""

    B: int
    H: int
    G: int
    d_h: int
    d_r: int
    page: int
    dtype: torch.dtype
    value_dtype: torch.dtype
    max_seqlen_q: int

    @property
    def R(self) -> int:
        return self.H // self.G

    @classmethod
    def of(cls, call: Call) -> Shape:
        q, values, batch = call.q_absorbed, call.pages.values, call.batch
        (_, H, d_h), (page, G), d_r = q.shape, values.shape[1:3], call.q_rope.shape[2]
        return cls(batch.seq_lens.shape[0], H, G, d_h, d_r, page, q.dtype, values.dtype, batch.max_seqlen_q)


class Rotation(NamedTuple):
    """Angles of new tokens: cos and sin [max_position, d_r/2] at positions [N]; pairs are (i, i + d_r/2)."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
