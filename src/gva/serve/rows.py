"""The cached row of a token, inside vLLM's pages: [values of all groups | rotated key].

In the model's precision a row is G*d_h + d_r scalars; under fp8 it is the packed row of `gva.ops.layout`. MLA is the
case of one group as wide as its latent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gva import ops
from gva.ops import fast
from gva.serve import versions


@dataclass(frozen=True)
class Row:
    """What one token of one layer occupies on this rank."""

    groups: int
    width: int  # of a group: d_h, or the latent
    rope_dim: int
    dtype: torch.dtype  # of the model
    fp8: bool

    @property
    def size(self) -> int:
        """Elements of `storage_dtype` in a row."""
        return ops.row_width(self.groups, self.width, self.rope_dim, self.fp8)

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.uint8 if self.fp8 else self.dtype

    def views(self, kv_cache: Tensor) -> ops.Pages:
        """Values [P, page, G, width], rotated keys [P, page, d_r] and, under fp8, scales [P, page, G] of a cache."""
        return ops.row_views(versions.pages(kv_cache), self.groups, self.width, self.rope_dim)

    def write(self, pages: ops.Pages, state: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        """Rows of new tokens: state [N, G*width], k_rope [N, d_r] at slots [N], negative ones being padding."""
        count = slots.shape[0]
        if count < state.shape[0]:  # tokens past it pad a graph
            state, k_rope = state[:count], k_rope[:count]
        fast.append(self.grouped(state), k_rope, pages, slots)

    def grouped(self, state: Tensor) -> Tensor:
        """[N, G*width] -> [N, G, width]"""
        return state.view(state.shape[0], self.groups, self.width)

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """State [T, G, width] and k_rope [T, d_r] of cached tokens, in the model's precision."""
        rows = versions.pages(kv_cache)
        rows = rows[slots // rows.shape[1], slots % rows.shape[1]]  # one gather of whole rows
        state, rope, scales = self.views(rows[None])
        if scales is not None:
            state = state.float() * scales[..., None]
        return state[0].to(self.dtype), rope[0].to(self.dtype)
