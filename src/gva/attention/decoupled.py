"""What GVA, GTA and MLA share: a cached content state, one cached rotated key for all heads, two forms.

The content score of a query and a state can be taken in two ways, which subclasses spell out: expanded, by keys built
from the state (`content`), or absorbed, by a query brought into the space of the state (`absorb`).
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

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Content keys [B, H or G, T, d_n] and values [B, H or G, T, d_h] of the state [B, T, width]."""
        raise NotImplementedError

    def absorb(self, q_nope: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, S, w] for the state as it is, [B, G, T, w], from q_nope [B, H, S, d_n]."""
        raise NotImplementedError

    def expand(self, state: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Whole keys [B, H or G, T, d_qk] and values of the state [B, T, width] and rotated keys [B, 1, T, d_r]."""
        k_nope, v = self.content(state)
        return join(k_nope, k_rope), v

    def project(self, hidden_states, positions, cache, form):
        q_nope, q_rope = self.split_query(self.queries(hidden_states))
        q_rope = rotate(q_rope, positions[0])
        k_rope = rotate(self.k_rope_proj(hidden_states)[:, None], positions[0])
        # The state is cached as one head, because a static cache gives keys and values equally many.
        k_rope, state = self.update_cache(cache, k_rope, self.state(hidden_states)[:, None])
        if form == "expanded":
            return torch.cat((q_nope, q_rope), dim=-1), *self.expand(state.squeeze(1), k_rope)
        q_absorbed, state = self.absorb(q_nope, state.squeeze(1))
        return torch.cat((q_absorbed, q_rope), dim=-1), join(state, k_rope), state

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        q_nope, q_rope = self.split_query(self.queries(hidden_states))
        k_nope, v = self.content(self.state(hidden_states))
        k_rope = self.k_rope_proj(hidden_states)[:, None]
        return {"q_nope": q_nope, "k_nope": k_nope, "q_rope": q_rope, "k_rope": k_rope, "v": v}


def join(k_nope: Tensor, k_rope: Tensor) -> Tensor:
    """[content | rotated key], the latter the same for every head."""
    return torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
