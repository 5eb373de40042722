"""Grouped Value Attention, in both forms, side by side.

Symbols: B batch, S query tokens, T cached tokens, H query heads, G value groups, R = H / G, d_h value width,
d_n content-key width, d_r positional width, d_qk = d_n + d_r. Head h reads group g(h) = h // R.

    q        = norm(x W_Q)            [B, H, S, d_qk]   norm only with query_norm; split [nope | rope]
    v        = x W_V                  [B, G, S, d_h]    cached
    k_rope   = rot(x W_r)             [B, 1, S, d_r]    cached, already rotated, shared by all heads
    q_rope   = rot(q_rope)

Expanded: keys are materialised, scores are d_qk wide. The oracle, and the faster way to train and prefill.

    k_nope_h = v_g(h) M_h             [B, H, T, d_n]
    s_h      = q_nope_h k_nope_h^T + q_rope_h k_rope^T

Absorbed: the map goes into the query, scores are d_h + d_r wide, no content key exists. The way to decode.

    q~_h     = q_nope_h M_h^T         [B, H, S, d_h]    one small batched product per step
    s_h      = q~_h v_g(h)^T + q_rope_h k_rope^T

Both: o_h = softmax(s_h / sqrt(d_qk)) v_g(h). The scale is that of the score before absorption.

With positional='rope' there is no slice: the whole rebuilt key is rotated, the rotation sits between q and M_h,
nothing absorbs, and keys are rebuilt and rotated from the cached values at every step (see shared_kv.py).

`key_map.weight` is [H d_n, d_h]: its rows h d_n to (h+1) d_n are M_h^T. As a Linear it shards over heads like
any other projection; it is never called, only read.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gva import ops
from gva.attention.base import local, split_heads
from gva.attention.decoupled import DecoupledAttention
from gva.attention.shared_kv import SharedKeyValueAttention


class KeyMap(nn.Linear):
    """The maps M_h of all heads, and the two ways to use them."""

    def __init__(self, config: Any) -> None:
        self.content_dim = config.content_dim
        super().__init__(config.value_head_dim, config.num_attention_heads * config.content_dim, bias=False)

    def transposed_maps(self) -> Tensor:
        """M_h^T of every head on this rank, [H, d_n, d_h]."""
        return local(self.weight).unflatten(0, (-1, self.content_dim))

    def rebuild_keys(self, v: Tensor) -> Tensor:
        """Content keys v_g(h) M_h: v [B, G, T, d_h] -> [B, H, T, d_n]."""
        maps = self.transposed_maps().unflatten(0, (v.shape[1], -1))
        return torch.einsum("bgtd,grnd->bgrtn", v, maps).flatten(1, 2)

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Queries q_nope M_h^T, whose product with a value is a content score: [B, H, S, d_n] -> [B, H, S, d_h]."""
        return torch.einsum("bhsn,hnd->bhsd", q_nope, self.transposed_maps())


class RotatedGroupedValueAttention(SharedKeyValueAttention):
    """positional='rope': the whole rebuilt key is rotated. The cache is V alone, and nothing absorbs."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_map = KeyMap(config)

    def rebuild_keys(self, v: Tensor) -> Tensor:
        return self.key_map.rebuild_keys(v)


class GroupedValueAttention(DecoupledAttention):
    """positional='decoupled': grouped values and one shared rotated key are cached, and content keys absorb."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.v_proj = nn.Linear(config.hidden_size, config.num_value_groups * config.value_head_dim, bias=False)
        self.key_map = self.make_map(config)

    def make_map(self, config: Any) -> Any:
        """What turns values into content keys."""
        return KeyMap(config)

    def break_even(self) -> float:
        """The number of queries at which mapping every key costs no more than widening every score."""
        d_h, d_n = self.config.value_head_dim, self.config.content_dim
        return d_h * d_n / (d_h - d_n) if d_n < d_h else float("inf")

    def state(self, hidden_states: Tensor) -> Tensor:
        return self.v_proj(hidden_states)

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        v = split_heads(state, self.config.value_head_dim)
        return self.key_map.rebuild_keys(v), v

    def absorb(self, q_nope: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.key_map.absorb(q_nope), split_heads(state, self.config.value_head_dim)

    def expand(self, state: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Where no gradient is wanted, one kernel builds the keys and repeats the values, which kernels of attention
        would otherwise ask for in several passes over both."""
        fused = isinstance(self.key_map, KeyMap) and state.is_cuda and not torch.is_grad_enabled()
        if not fused:
            return super().expand(state, k_rope)
        v = state.unflatten(-1, (-1, self.config.value_head_dim))
        k, v = ops.expand(v, k_rope.squeeze(1), self.key_map.transposed_maps().to(v.dtype))
        return k.transpose(1, 2), v.transpose(1, 2)
