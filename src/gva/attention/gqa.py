"""Grouped-query attention: G keys and G values are cached. MHA is G = H, MQA is G = 1."""

from typing import Any

from torch import Tensor

from gva.attention.base import Attention, Cached, Part, Query, Row
from gva.attention.rope import Rotation, rotate


class GroupedQueryAttention(Attention):
    @classmethod
    def row(cls, config: Any) -> Row:
        part = Part(config.num_value_groups, config.value_head_dim)
        return Row((part, part))

    @classmethod
    def projections(cls, config: Any) -> dict[str, Part]:
        return dict(zip(("k_proj", "v_proj"), cls.row(config).content, strict=True))

    def project(self, hidden_states: Tensor, rotation: Rotation) -> tuple[Query, Cached]:
        q, k, v = self.inputs(hidden_states)
        return Query(rotate(q, rotation)), (rotate(k, rotation), v)

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        k, v = row
        return k, v


class MultiHeadAttention(GroupedQueryAttention):
    @classmethod
    def fixed_groups(cls, heads: int) -> int:
        return heads


class MultiQueryAttention(GroupedQueryAttention):
    @classmethod
    def fixed_groups(cls, heads: int) -> int:
        return 1
