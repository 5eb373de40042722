"""Grouped-tied attention (arXiv 2505.21487): GVA with the map fixed to [I; 0].

One tied state per group: its first half is the content key, all of it the value. The other half of a key is
one rotated slice shared by all heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gva.attention.gva import GroupedValueAttention


class TiedMap(nn.Module):
    """The map [I; 0], which needs no parameter and no product."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.content_dim = config.content_dim
        self.tail = config.value_head_dim - config.content_dim

    def rebuild_keys(self, v: Tensor) -> Tensor:
        """Content keys shared by a group: v [B, G, T, d_h] -> [B, G, T, d_n]."""
        return v[..., : self.content_dim]

    def absorb(self, q_nope: Tensor) -> Tensor:
        """[B, H, S, d_n] -> [B, H, S, d_h]: the tail of a value takes no part in its score."""
        return torch.nn.functional.pad(q_nope, (0, self.tail))


class GroupedTiedAttention(GroupedValueAttention):
    def make_map(self, config: Any) -> TiedMap:
        return TiedMap(config)

    def break_even(self) -> float:
        """The expanded form costs nothing here: keys are a view of the values."""
        return 0
