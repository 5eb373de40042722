"""Shared KV, the paper's first cut: K = V under ordinary RoPE. The cache is V alone."""

from typing import Any

from torch import Tensor

from gva.attention.base import Attention, Cached, Part, Query, Row
from gva.attention.rope import Rotation, rotate


class SharedKeyValueAttention(Attention):
    rotates_late = True

    @classmethod
    def row(cls, config: Any) -> Row:
        return Row((Part(config.num_value_groups, config.value_head_dim),))

    @classmethod
    def projections(cls, config: Any) -> dict[str, Part]:
        return {"v_proj": cls.row(config).content[0]}

    def project(self, hidden_states: Tensor, rotation: Rotation) -> tuple[Query, Cached]:
        q, v = self.inputs(hidden_states)
        return Query(rotate(q, rotation)), (v,)

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        (v,) = row
        assert rotation is not None, "keys that rotate late need the rotation of their slots"
        return rotate(self.rebuild_keys(v), rotation), v

    def rebuild_keys(self, v: Tensor) -> Tensor:
        """Unrotated keys [..., G or H, d_h] of v [..., G, d_h]."""
        return v
