"""What GVA, GTA and MLA share: a cached content state, one cached rotated key for all heads, two forms.

The content score of a query and a state can be taken in two ways, which subclasses spell out in `content`:
expanded, by keys built from the state, or absorbed, by a query brought into the space of the state.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gva.attention.base import Attention
from gva.attention.rope import rotate


class DecoupledAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.k_rope_proj = nn.Linear(config.hidden_size, config.rope_dim, bias=False)

    def state(self, hidden_states: Tensor) -> Tensor:
        """What is cached of the content, [B, S, width]."""
        raise NotImplementedError

    def content(self, q_nope: Tensor, state: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the content, from q_nope [B, H, S, d_n] and all cached state [B, T, width]."""
        raise NotImplementedError

    def project(self, hidden_states, positions, cache, form):
        q_nope, q_rope = self.split_query(self.queries(hidden_states))
        q_rope = rotate(q_rope, positions[0])
        k_rope = rotate(self.k_rope_proj(hidden_states)[:, None], positions[0])
        # The state is cached as one head, because a static cache gives keys and values equally many.
        k_rope, state = self.update_cache(cache, k_rope, self.state(hidden_states)[:, None])
        q_nope, k_nope, v = self.content(q_nope, state.squeeze(1), form)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        return q, k, v

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        q_nope, q_rope = self.split_query(self.queries(hidden_states))
        _, k_nope, v = self.content(q_nope, self.state(hidden_states), "expanded")
        k_rope = self.k_rope_proj(hidden_states)[:, None]
        return {"q_nope": q_nope, "k_nope": k_nope, "q_rope": q_rope, "k_rope": k_rope, "v": v}
