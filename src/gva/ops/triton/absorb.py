"""Queries for the values as they lie: the content of a query times the map of its head."""

import triton
import triton.language as tl

from .decode import dot


@triton.jit(do_not_specialize=["N"])  # it differs from step to step: no second compilation where 16 divides it
def absorb_kernel(
    queries, maps, absorbed, N, stride_qn, stride_qh,
    H: tl.constexpr, D_N: tl.constexpr, D_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of TILE tokens, heads, columns of `absorbed` in blocks of BLOCK_D. It and `maps` are contiguous."""
    n_index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n_offset = n_index.to(tl.int64)
    h = tl.program_id(1)
    c_index = tl.arange(0, BLOCK_N)
    d_index = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    real, content, column = (n_index < N)[:, None], c_index < D_N, (d_index < D_H)[None, :]
    p_q = queries + (n_offset * stride_qn + h * stride_qh)[:, None] + c_index[None, :]
    b_q = tl.load(p_q, mask=real & content[None, :], other=0.0)
    p_map = maps + (h * D_N + c_index)[:, None] * D_H + d_index[None, :]
    b_map = tl.load(p_map, mask=content[:, None] & column, other=0.0)
    b_out = dot(b_q, b_map, tl.zeros([TILE, BLOCK_D], tl.float32), PRECISION, WIDEN)
    p_out = absorbed + (n_offset * H + h)[:, None] * D_H + d_index[None, :]
    tl.store(p_out, b_out.to(b_q.dtype), mask=real & column)
