"""The expanded form's keys and values: one of each per head, for kernels that want as many of one as of the other."""

import torch
from torch import Tensor

from .backend import select
from .library import _library

_library.define("expand(Tensor values, Tensor k_rope, Tensor maps, str impl) -> (Tensor, Tensor)")


def expand(values: Tensor, k_rope: Tensor, maps: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Keys [B, T, H, d_n + d_r] and values [B, T, H, d_h] of all heads, contiguous; no gradient.

    values  [B, T, G, d_h]   any strides over B*T and G, last dimension contiguous
    k_rope  [B, T, d_r]      rotated, shared by all heads
    maps    [H, d_n, d_h]    M_h^T: the content key of head h is v_g(h) M_h
    """
    G, d_h = values.shape[2:]
    H = maps.shape[0]
    if maps.shape[2] != d_h or H % G or k_rope.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"values {tuple(values.shape)}, k_rope {tuple(k_rope.shape)}, maps {tuple(maps.shape)}: "
            "need [B, T, G, d_h], [B, T, d_r] and [H, d_n, d_h] with H a multiple of G"
        )
    return torch.ops.gva.expand(values, k_rope, maps, impl or "")


def expand_tokens(
    values: Tensor, k_rope: Tensor, maps: Tensor, slots: Tensor | None = None, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Keys [T, H, d_n + d_r] and values [T, H, d_h] of tokens one after another, without checks and outside
    torch.library, for callers that count microseconds.

    values  [T, G, d_h] and k_rope [T, d_r]; or, with `slots` [T], the pages [P, page, G, d_h] and [P, page, d_r] that
            hold them, where a slot is page id * page + row in the page
    """
    if select(impl, values.device, values.dtype, values.dtype) == "reference":
        if slots is not None:
            at = slots // values.shape[1], slots % values.shape[1]
            values, k_rope = values[at], k_rope[at]
        return reference(values, k_rope, maps)
    from .triton import launch

    return launch.expand(values, k_rope, maps, slots)


def reference(values: Tensor, k_rope: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    T, G, _ = values.shape
    H = maps.shape[0]
    k_nope = torch.einsum("tgd,grnd->tgrn", values, maps.unflatten(0, (G, -1))).flatten(1, 2)
    return torch.cat((k_nope, k_rope[:, None].expand(T, H, -1)), dim=-1), values.repeat_interleave(H // G, dim=1)


def _expand(values: Tensor, k_rope: Tensor, maps: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    B, T = values.shape[:2]
    k, v = expand_tokens(values.flatten(0, 1), k_rope.flatten(0, 1), maps, impl=impl or None)
    return k.unflatten(0, (B, T)), v.unflatten(0, (B, T))


def _shapes(values: Tensor, k_rope: Tensor, maps: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    B, T, _, d_h = values.shape
    H, d_n, _ = maps.shape
    return values.new_empty(B, T, H, d_n + k_rope.shape[2]), values.new_empty(B, T, H, d_h)


_library.impl("expand", _expand, "CompositeExplicitAutograd")
torch.library.register_fake("gva::expand", _shapes, lib=_library)
