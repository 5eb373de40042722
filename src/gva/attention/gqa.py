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
        k = rotate(split_heads(self.k_proj(hidden_states), self.config.value_head_dim), position_embeddings)
        v = split_heads(self.v_proj(hidden_states), self.config.value_head_dim)
        k, v = self.update_cache(past_key_values, k, v)
        attended, weights = self.attend(q, k, v, attention_mask, **kwargs)
        return self.output(attended), weights

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        d_h = self.config.value_head_dim
        return {
            "q_nope": self.queries(hidden_states),
            "k_nope": split_heads(self.k_proj(hidden_states), d_h),
            "q_rope": None,
            "k_rope": None,
            "v": split_heads(self.v_proj(hidden_states), d_h),
        }
