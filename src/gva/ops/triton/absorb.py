"""Queries for the values as they lie: the content of a query times the map of its head."""

import functools

import torch
import triton
import triton.language as tl

from ..config import power_of_two
from .decode import dot
from .remember import Constants, Remembered


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


launch_absorb = Remembered(absorb_kernel)


def absorb(q: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    (N, H, _), (_, d_n, d_h) = q.shape, maps.shape
    absorbed = torch.empty(N, H, d_h, dtype=q.dtype, device=q.device)
    if N == 0:
        return absorbed
    tile, block_d, compiled_for = constants(H, d_n, d_h, q.dtype)
    launch_absorb((-(-N // tile), H, -(-d_h // block_d)), compiled_for, q, maps, absorbed, N, *q.stride()[:2])
    return absorbed


@functools.cache
def constants(H: int, d_n: int, d_h: int, dtype: torch.dtype) -> tuple[int, int, Constants]:
    """Tokens and columns of a program, and what it is compiled for."""
    tile, block_d = 32, max(16, min(128 if dtype.itemsize == 2 else 64, power_of_two(d_h)))
    return (
        tile,
        block_d,
        Constants(
            H=H,
            D_N=d_n,
            D_H=d_h,
            BLOCK_N=max(16, min(64 if dtype.itemsize == 2 else 32, power_of_two(d_n))),
            BLOCK_D=block_d,
            TILE=tile,
            PRECISION="ieee" if dtype == torch.float32 else None,
            WIDEN=launch_absorb.interpreted and dtype == torch.bfloat16,
            num_warps=4,
        ),
    )
