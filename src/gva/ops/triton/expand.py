"""Keys and values per head from grouped values: what separates a GVA prefill from a GQA one, in one pass."""

import triton
import triton.language as tl

from .decode import dot


@triton.jit(do_not_specialize=["N"])  # it differs at every call: no second compilation where 16 divides it
def expand_kernel(
    values, k_rope, slots, maps, keys, repeated, N,
    stride_vp, stride_vn, stride_vg, stride_rp, stride_rn,
    R: tl.constexpr, H: tl.constexpr, D_H: tl.constexpr, D_N: tl.constexpr, D_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of TILE tokens, groups. A tile of values is read once and serves the R heads of its group; the
    columns of a key past its content are the rotated key. Outputs are contiguous: writing them is the cost.
    PAGE > 0: tokens lie in pages of so many rows, at `slots`."""
    n_index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n_offset = n_index.to(tl.int64)
    g = tl.program_id(1)
    d_index = tl.arange(0, BLOCK_D)
    k_index = tl.arange(0, BLOCK_K)
    real = (n_index < N)[:, None]
    d_real = real & (d_index < D_H)[None, :]
    if PAGE > 0:
        slot = tl.load(slots + n_index, mask=n_index < N, other=0).to(tl.int64)
        v_offset = slot // PAGE * stride_vp + slot % PAGE * stride_vn
        r_offset = slot // PAGE * stride_rp + slot % PAGE * stride_rn
    else:
        v_offset = n_offset * stride_vn
        r_offset = n_offset * stride_rn
    b_v = tl.load(values + (v_offset + g * stride_vg)[:, None] + d_index[None, :], mask=d_real, other=0.0)
    slice_real = real & (k_index >= D_N)[None, :] & (k_index < D_N + D_R)[None, :]
    b_slice = tl.load(k_rope + r_offset[:, None] + (k_index - D_N)[None, :], mask=slice_real, other=0.0)
    map_real = (k_index < D_N)[None, :] & (d_index < D_H)[:, None]
    for r in tl.static_range(R):
        h = g * R + r
        b_map = tl.load(maps + (h * D_N + k_index)[None, :] * D_H + d_index[:, None], mask=map_real, other=0.0)
        b_k = dot(b_v, b_map, tl.zeros([TILE, BLOCK_K], tl.float32), PRECISION, WIDEN).to(b_v.dtype)
        b_k = tl.where((k_index < D_N)[None, :], b_k, b_slice)
        row = (n_offset * H + h)[:, None]
        tl.store(keys + row * (D_N + D_R) + k_index[None, :], b_k, mask=real & (k_index < D_N + D_R)[None, :])
        tl.store(repeated + row * D_H + d_index[None, :], b_v, mask=d_real)
