"""Grouped-query attention: G keys and G values are cached. MHA is G = H, MQA is G = 1."""

from typing import Any

from torch import Tensor, nn

from gva.attention.base import Attention, split_heads
from gva.attention.rope import rotate


class GroupedQueryAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.num_value_groups * config.value_head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)

    def project(self, hidden_states, positions, cache, form):
        q = rotate(self.queries(hidden_states), positions[0])
        k = rotate(split_heads(self.k_proj(hidden_states), self.config.value_head_dim), positions[0])
        v = split_heads(self.v_proj(hidden_states), self.config.value_head_dim)
        return q, *self.update_cache(cache, k, v)

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        d_h = self.config.value_head_dim
        return {
            "q_nope": self.queries(hidden_states),
            "k_nope": split_heads(self.k_proj(hidden_states), d_h),
            "q_rope": None,
            "k_rope": None,
            "v": split_heads(self.v_proj(hidden_states), d_h),
        }
