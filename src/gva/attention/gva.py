"""Grouped Value Attention, in both forms, side by side.

Symbols: S query tokens, T cached tokens, H query heads, G value groups, R = H / G, d_h value width,
d_n content-key width, d_r positional width, d_qk = d_n + d_r. Head h reads group g(h) = h // R.

    q        = norm(x W_Q)            [S, H, d_qk]   norm only with query_norm; split [nope | rope]
    v        = x W_V                  [S, G, d_h]    cached
    k_rope   = rot(x W_r)             [S, d_r]       cached, already rotated, shared by all heads
    q_rope   = rot(q_rope)

Expanded: keys are materialised, scores are d_qk wide. The oracle, and the faster way to train and prefill.

    k_nope_h = v_g(h) M_h             [T, H, d_n]
    s_h      = q_nope_h k_nope_h^T + q_rope_h k_rope^T

Absorbed: the map goes into the query, scores are d_h + d_r wide, no content key exists. The way to decode.

    q~_h     = q_nope_h M_h^T         [S, H, d_h]    one small batched product per step
    s_h      = q~_h v_g(h)^T + q_rope_h k_rope^T

Both: o_h = softmax(s_h / sqrt(d_qk)) v_g(h). The scale is that of the score before absorption.

With positional='rope' there is no slice: the whole rebuilt key is rotated, the rotation sits between q and M_h,
nothing absorbs, and keys are rebuilt and rotated from the cached values at every step (see shared_kv.py).

With map_init='none' there are no maps: a value is the content key of its group, q_nope is d_h wide, both forms are one.
`key_map.weight` is [H d_n, d_h]: its rows h d_n to (h+1) d_n are M_h^T. As a Linear it shards over heads like
any other projection, and what replaces a Linear may replace it (`per_head`).
"""

from typing import Any

import torch
from torch import Tensor

from gva import ops
from gva.attention.base import Cached, in_one_row, per_head
from gva.attention.decoupled import DecoupledAttention, absorbed_by
from gva.attention.rope import Rotation
from gva.attention.shared_kv import SharedKeyValueAttention
from gva.errors import check, check_choice
from gva.ops import fast


def settle_map(config: Any, *others: str) -> None:
    config.map_init = config.map_init or "scale_matched"
    check_choice("map_init", config.map_init, ("scale_matched", "standard", *others))


def key_map(config: Any) -> dict[str, tuple[int, int]]:
    return {} if config.map_init == "none" else {"key_map": (config.content_dim, config.value_head_dim)}


def rebuild_keys(v: Tensor, maps: Tensor) -> Tensor:
    """Content keys v_g(h) M_h: v [..., G, d_h], maps [H, d_n, d_h] -> [..., H, d_n]."""
    maps = maps.unflatten(0, (v.shape[-2], -1))
    return torch.einsum("...gd,grnd->...grn", v, maps).flatten(-3, -2)


class RotatedGroupedValueAttention(SharedKeyValueAttention):
    """positional='rope': the whole rebuilt key is rotated. The cache is V alone, and nothing absorbs."""

    fields = ("map_init",)
    settle = staticmethod(settle_map)
    maps = staticmethod(key_map)

    def rebuild_keys(self, v: Tensor) -> Tensor:
        return rebuild_keys(v, per_head(self.key_map, self.config.content_dim, v))


class GroupedValueAttention(DecoupledAttention):
    """positional='decoupled': grouped values and one shared rotated key are cached, and content keys absorb."""

    allocations = ("carved", "additive")
    fields = ("map_init",)
    maps = staticmethod(key_map)

    @classmethod
    def settle(cls, config: Any) -> None:
        settle_map(config, "none")
        if config.map_init == "none":
            config.rope_allocation = config.rope_allocation or "additive"
            check(
                config.rope_allocation == "additive",
                "rope_allocation",
                config.rope_allocation,
                "without maps a value is the content key, whole: must be 'additive'",
            )

    @property
    def mapped(self) -> bool:
        return self.config.map_init != "none"

    def break_even(self) -> float:
        """The number of queries at which mapping every key costs no more than widening every score."""
        d_h, d_n = self.config.value_head_dim, self.config.content_dim
        return d_h * d_n / (d_h - d_n) if d_n < d_h else float("inf")

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self.mapped:
            return state, state
        return rebuild_keys(state, per_head(self.key_map, self.config.content_dim, state)), state

    def absorb(self, content: Tensor) -> Tensor:
        if not self.mapped:
            return content
        return absorbed_by(content, per_head(self.key_map, self.config.content_dim, content))

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """Where no gradient is wanted, one kernel builds the keys and repeats the values, which kernels of attention
        would otherwise ask for in several passes over both."""
        if not self.mapped:
            return super().expand(row, rotation)
        v, k_rope = row
        maps = per_head(self.key_map, self.config.content_dim, v).to(v.dtype)
        if in_one_row(v):
            return fast.expand(v, k_rope, maps)
        if v.is_cuda and not torch.is_grad_enabled():
            return ops.expand(v, k_rope, maps)
        return super().expand(row, rotation)

    def expand_at(self, pages: Cached, slots: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """The kernel reads the pages itself."""
        if not self.mapped:
            return super().expand_at(pages, slots, rotation)
        v, k_rope = pages
        return fast.expand(v, k_rope, per_head(self.key_map, self.config.content_dim, k_rope), slots)
