"""GVA whose content keys have a projection of their own: what it costs to tie them to the values.

    k_nope   = x W_K       [.., G, d_n]    cached
    v        = x W_V       [.., G, d_h]    cached
    k_rope   = rot(x W_r)  [.., d_r]       cached, shared by all heads

Head h scores q_nope_h k_nope_g(h)^T + q_rope_h k_rope^T. Keys are stored, so there is nothing to absorb.
"""

from typing import Any

from torch import Tensor

from gva.attention.base import Cached, Part, Row
from gva.attention.decoupled import DecoupledAttention, join
from gva.attention.rope import Rotation


class UntiedKeyAttention(DecoupledAttention):
    allocations = ("carved", "additive")
    absorbs = False

    @classmethod
    def row(cls, config: Any) -> Row:
        keys = Part(config.num_value_groups, config.content_dim)
        return Row((keys, cls.state(config)), Part(1, config.rope_dim, shared=True))

    @classmethod
    def projections(cls, config: Any) -> dict[str, Part]:
        return dict(zip(("k_proj", "v_proj", "k_rope_proj"), cls.row(config).parts, strict=True))

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        k_nope, v, k_rope = row
        return join(k_nope, k_rope), v
