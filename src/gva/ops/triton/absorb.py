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
    d_index = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    real, column = (n_index < N)[:, None], (d_index < D_H)[None, :]
    p_q = queries + (n_offset * stride_qn + h * stride_qh)[:, None]
    p_map = maps + h * D_N * D_H + d_index[None, :]
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for first in range(0, D_N, BLOCK_N):
        c_index = first + tl.arange(0, BLOCK_N)
        content = c_index < D_N
        b_q = tl.load(p_q + c_index[None, :], mask=real & content[None, :], other=0.0)
        b_map = tl.load(p_map + c_index[:, None] * D_H, mask=content[:, None] & column, other=0.0)
        acc = dot(b_q, b_map, acc, PRECISION, WIDEN)
    p_out = absorbed + (n_offset * H + h)[:, None] * D_H + d_index[None, :]
    tl.store(p_out, acc.to(absorbed.dtype.element_ty), mask=real & column)
