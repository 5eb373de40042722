"""What GVA, GTA and MLA share: a cached content state, one cached rotated key for all heads, two forms.

The content score of a query and a state can be taken in two ways, which subclasses spell out: expanded, by keys built
from the state (`content`), or absorbed, by a query brought into the space of the state (`absorb`).
"""

from typing import Any

import torch
from torch import Tensor

from gva.attention.base import Attention, Cached, Part, Query, Row, in_one_row
from gva.attention.rope import Rotation, rotate
from gva.ops import fast


class DecoupledAttention(Attention):
    positional = "decoupled"
    absorbs = True

    @classmethod
    def state(cls, config: Any) -> Part:
        """The content that is cached: by default the values of all groups."""
        return Part(config.num_value_groups, config.value_head_dim)

    @classmethod
    def row(cls, config: Any) -> Row:
        return Row((cls.state(config),), Part(1, config.rope_dim, shared=True))

    @classmethod
    def projections(cls, config: Any) -> dict[str, Part]:
        row = cls.row(config)
        assert row.rope is not None
        return {"v_proj": row.content[0], "k_rope_proj": row.rope}

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Content keys [..., H or G, d_n] and values [..., H or G, d_h] of the state [..., heads, width]."""
        raise NotImplementedError

    def project(self, hidden_states: Tensor, rotation: Rotation) -> tuple[Query, Cached]:
        q, *content, k_rope = self.inputs(hidden_states)
        q_nope, q_rope = q.split((self.config.content_dim, self.config.rope_dim), dim=-1)
        return Query(q_nope, rotate(q_rope, rotation)), (*content, rotate(k_rope, rotation).squeeze(-2))

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        state, k_rope = row
        k_nope, v = self.content(state)
        return join(k_nope, k_rope), v


def absorbed_by(content: Tensor, maps: Tensor) -> Tensor:
    """q_nope_h M_h^T: content [..., H, d_n] and maps [H, d_n, width] -> [..., H, width]."""
    if in_one_row(content):
        return fast.absorb(content, maps)
    return torch.einsum("...hn,hnd->...hd", content, maps)


def join(content: Tensor, k_rope: Tensor) -> Tensor:
    """[content | rotated key], the latter the same for every head."""
    return torch.cat((content, k_rope.unsqueeze(-2).expand(*content.shape[:-1], -1)), dim=-1)
