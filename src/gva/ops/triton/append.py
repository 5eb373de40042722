"""New rows into pages: k_rope rotated, values quantised where the cache is fp8, one pass."""

import functools

import torch
import triton
import triton.language as tl

from ..call import Pages, Rotation
from ..config import power_of_two
from .remember import Constants, Remembered


@triton.jit
def append_kernel(
    values, k_rope, value_pages, rope_pages, value_scales, slots, positions, cos, sin,
    stride_xn, stride_xg, stride_kn, stride_vp, stride_vt, stride_vg, stride_rp, stride_rt,
    stride_sp, stride_st, stride_sg, stride_cos,
    G: tl.constexpr, D_H: tl.constexpr, D_R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    ROTATE: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Grid: new tokens. A negative slot is a padding token: nothing is written."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    if slot >= 0:
        page = slot // PAGE
        row = slot % PAGE
        g_index = tl.arange(0, BLOCK_G)
        d_index = tl.arange(0, BLOCK_D)
        real = (g_index < G)[:, None] & (d_index < D_H)[None, :]
        b_v = tl.load(values + n * stride_xn + g_index[:, None] * stride_xg + d_index[None, :], mask=real, other=0.0)
        if QUANTISE:
            b_v = b_v.to(tl.float32)
            b_scale = tl.max(tl.abs(b_v), 1) / 448.0
            divisor = tl.where(b_scale > 0, b_scale, 1.0)[:, None]
            b_v = tl.div_rn(b_v, tl.broadcast_to(divisor, [BLOCK_G, BLOCK_D]))
            b_v = tl.minimum(tl.maximum(b_v, -448.0), 448.0)
            tl.store(value_scales + page * stride_sp + row * stride_st + g_index * stride_sg, b_scale, mask=g_index < G)
        p_v = value_pages + page * stride_vp + row * stride_vt + g_index[:, None] * stride_vg + d_index[None, :]
        tl.store(p_v, b_v.to(value_pages.dtype.element_ty), mask=real)

        half = tl.arange(0, BLOCK_R)
        pair = half < D_R // 2
        first = tl.load(k_rope + n * stride_kn + half, mask=pair, other=0.0).to(tl.float32)
        second = tl.load(k_rope + n * stride_kn + D_R // 2 + half, mask=pair, other=0.0).to(tl.float32)
        if ROTATE:
            at = tl.load(positions + n).to(tl.int64)
            b_cos = tl.load(cos + at * stride_cos + half, mask=pair, other=0.0).to(tl.float32)
            b_sin = tl.load(sin + at * stride_cos + half, mask=pair, other=0.0).to(tl.float32)
            turned = first * b_cos - second * b_sin
            second = second * b_cos + first * b_sin
            first = turned
        p_k = rope_pages + page * stride_rp + row * stride_rt + half
        tl.store(p_k, first.to(rope_pages.dtype.element_ty), mask=pair)
        tl.store(p_k + D_R // 2, second.to(rope_pages.dtype.element_ty), mask=pair)


launch_append = Remembered(append_kernel)


def append(
    state: torch.Tensor, k_rope: torch.Tensor, pages: Pages, slots: torch.Tensor, rotation: Rotation | None
) -> None:
    """One program per new token."""
    (N, G, d_h), d_r = state.shape, k_rope.shape[1]
    if N == 0:
        return
    values, rope, scales = pages
    positions, cos, sin = (slots, k_rope, k_rope) if rotation is None else rotation
    launch_append(
        (N,),
        constants(G, d_h, d_r, values.shape[1], rotation is not None, scales is not None),
        state,
        k_rope,
        values,
        rope,
        rope if scales is None else scales,
        slots,
        positions,
        cos,
        sin,
        *state.stride()[:2],
        k_rope.stride(0),
        *values.stride()[:3],
        *rope.stride()[:2],
        *((0, 0, 0) if scales is None else scales.stride()),
        0 if rotation is None else cos.stride(0),
    )


@functools.cache
def constants(G: int, d_h: int, d_r: int, page: int, rotate: bool, quantise: bool) -> Constants:
    return Constants(
        G=G,
        D_H=d_h,
        D_R=d_r,
        PAGE=page,
        BLOCK_G=power_of_two(G),
        BLOCK_D=power_of_two(d_h),
        BLOCK_R=power_of_two(max(d_r // 2, 1)),
        ROTATE=rotate,
        QUANTISE=quantise,
        num_warps=4,
    )
