"""Grouped-tied attention (arXiv 2505.21487): GVA with the map fixed to [I; 0].

One tied state per group: its first half is the content key, all of it the value. The other half of a key is
one rotated slice shared by all heads.
"""

from typing import Any

import torch
from torch import Tensor

from gva.attention.decoupled import DecoupledAttention
from gva.errors import check


class GroupedTiedAttention(DecoupledAttention):
    @classmethod
    def settle(cls, config: Any) -> None:
        d_h = config.value_head_dim
        check(d_h % 4 == 0, "value_head_dim", d_h, "gta rotates half of a head: must be divisible by 4")
        config.rope_dim = d_h // 2 if config.rope_dim is None else config.rope_dim
        check(config.rope_dim == d_h // 2, "rope_dim", config.rope_dim, f"gta has value_head_dim / 2 = {d_h // 2}")

    @classmethod
    def decode_widths(cls, config: Any) -> tuple[int, int]:
        """Keys are a view of the values: the unabsorbed score is free, and narrower."""
        return config.score_dim, config.value_head_dim

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return state[..., : self.config.content_dim], state

    def absorb(self, content: Tensor) -> Tensor:
        """The tail of a value takes no part in its score."""
        return torch.nn.functional.pad(content, (0, self.config.value_head_dim - self.config.content_dim))
