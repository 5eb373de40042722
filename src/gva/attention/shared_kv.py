"""Shared KV, the paper's first cut: K = V under ordinary RoPE. The cache is V alone."""

from typing import Any

from torch import Tensor, nn

from gva.attention.base import Attention, split_heads
from gva.attention.rope import rotate


class SharedKeyValueAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.v_proj = nn.Linear(config.hidden_size, config.num_value_groups * config.value_head_dim, bias=False)

    def forward(
        self,
        hidden_states,
        position_embeddings,
        key_position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        attention_form=None,
        **kwargs,
    ):
        self.choose_form(attention_form, past_key_values is not None, hidden_states.shape[1])
        q = rotate(self.queries(hidden_states), position_embeddings)
        v = self.v_proj(hidden_states)
        if past_key_values is not None:
            v = self.cached_values(past_key_values, v)
        v = split_heads(v, self.config.value_head_dim)
        # With a cache, keys and queries are rotated by slot: positions up to a shift per row, and only differences
        # of positions enter a score.
        k = rotate(self.rebuild_keys(v), key_position_embeddings or position_embeddings)
        attended, weights = self.attend(q, k, v, attention_mask, **kwargs)
        return self.output(attended), weights

    def cached_values(self, cache: Any, v: Tensor) -> Tensor:
        """Append v [B, S, G d_h]; returns all of it, [B, T, G d_h].

        The cache's keys hold V and its values nothing: a cache tells its length from its keys.
        """
        held, _ = self.update_cache(cache, v[:, None], v.new_empty(v.shape[0], 1, v.shape[1], 0))
        return held.squeeze(1)

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
