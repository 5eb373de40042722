"""Keys and values per head from grouped values: what separates a GVA prefill from a GQA one, in one pass."""

import functools

import torch
import triton
import triton.language as tl

from ..config import power_of_two
from .decode import dot
from .remember import Constants, Remembered


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


launch_expand = Remembered(expand_kernel)


def expand(
    values: torch.Tensor, k_rope: torch.Tensor, maps: torch.Tensor, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    N = (values if slots is None else slots).shape[0]
    page = 0 if slots is None else values.shape[1]
    (G, d_h), (H, d_n, _), d_r = values.shape[-2:], maps.shape, k_rope.shape[-1]
    keys, repeated = (torch.empty(N, H, width, dtype=values.dtype, device=values.device) for width in (d_n + d_r, d_h))
    if N == 0:
        return keys, repeated
    if values.stride(-1) != 1 or k_rope.stride(-1) != 1:
        values, k_rope = values.contiguous(), k_rope.contiguous()
    tile, compiled_for = constants(G, H, d_h, d_n, d_r, page, values.dtype)
    launch_expand(
        (-(-N // tile), G),
        compiled_for,
        values,
        k_rope,
        values if slots is None else slots,
        maps.contiguous(),
        keys,
        repeated,
        N,
        values.stride(0),
        values.stride(-3),
        values.stride(-2),
        k_rope.stride(0),
        k_rope.stride(-2),
    )
    return keys, repeated


@functools.cache
def constants(G: int, H: int, d_h: int, d_n: int, d_r: int, page: int, dtype: torch.dtype) -> tuple[int, Constants]:
    """Tokens of a program, and what it is compiled for."""
    block_d, block_k = max(16, power_of_two(d_h)), max(16, power_of_two(d_n + d_r))
    tile = 64 if max(block_d, block_k) <= 128 and dtype.itemsize == 2 else 16
    return tile, Constants(
        R=H // G,
        H=H,
        D_H=d_h,
        D_N=d_n,
        D_R=d_r,
        PAGE=page,
        BLOCK_D=block_d,
        BLOCK_K=block_k,
        TILE=tile,
        PRECISION="ieee" if dtype == torch.float32 else None,
        WIDEN=launch_expand.interpreted and dtype == torch.bfloat16,
        num_warps=4,
    )
