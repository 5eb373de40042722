"""New rows into pages: k_rope rotated, values quantised where the cache is fp8, one pass."""

import triton
import triton.language as tl


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
