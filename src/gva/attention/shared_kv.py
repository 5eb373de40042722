"""Shared KV, the paper's first cut: K = V under ordinary RoPE. The cache is V alone."""

from typing import Any

import torch
from torch import Tensor, nn

from gva.attention.base import Attention, split_heads
from gva.attention.rope import rotate, tables


class SharedKeyValueAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.v_proj = nn.Linear(config.hidden_size, config.num_value_groups * config.value_head_dim, bias=False)

    def project(self, hidden_states, positions, cache, form):
        q = rotate(self.queries(hidden_states), positions[0])
        v = self.v_proj(hidden_states)
        v = split_heads(v if cache is None else self.cached_values(cache, v), self.config.value_head_dim)
        # With a cache, keys and queries are rotated by slot: positions up to a shift per row, and only differences
        # of positions enter a score.
        return q, rotate(self.rebuild_keys(v), positions[1]), v

    def cached_values(self, cache: Any, v: Tensor) -> Tensor:
        """Append v [B, S, G d_h]; returns all of it, [B, T, G d_h].

        The cache's keys hold V and its values nothing: a cache tells its length from its keys.
        """
        held, _ = self.update_cache(cache, v[:, None], v.new_empty(v.shape[0], 1, v.shape[1], 0))
        return held.squeeze(1)

    def keys_of_slots(self, v: Tensor, first: int = 0) -> Tensor:
        """Rotated keys [B, G or H, T, d_h] of the cached values v [B, G, T, d_h], their positions being the slots from
        `first` on."""
        slots = torch.arange(first, first + v.shape[2], device=v.device)[None]
        return rotate(self.rebuild_keys(v), tables(self.config, slots, v.dtype))

    def rebuild_keys(self, v: Tensor) -> Tensor:
        """Unrotated keys [B, G or H, T, d_h] of v [B, G, T, d_h]."""
        return v

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        v = split_heads(self.v_proj(hidden_states), self.config.value_head_dim)
        return {
            "q_nope": self.queries(hidden_states),
            "k_nope": self.rebuild_keys(v),
            "q_rope": None,
            "k_rope": None,
            "v": v,
        }
