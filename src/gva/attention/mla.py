"""Multi-head latent attention (arXiv 2405.04434): one latent and one shared rotated slice are cached.

Full-rank query; joint latent of width d_c, normalised before it is cached, unless latent_norm=False leaves that out;
d_n = d_h - d_r, or d_h where the slice is additive; values d_h wide.

    c        = norm(x W_DKV)          [.., 1, d_c]     cached
    k_rope   = rot(x W_r)             [.., d_r]        cached
    expanded   k_nope_h = c W_UK_h,  v_h = c W_UV_h
    absorbed   q~_h = q_nope_h W_UK_h^T,  o_h = (softmax(.) c) W_UV_h
"""

from typing import Any

import torch
from torch import Tensor

from gva.attention.base import Cached, Part, Query, per_head
from gva.attention.decoupled import DecoupledAttention, absorbed_by
from gva.attention.rope import Rotation


class LatentAttention(DecoupledAttention):
    state_is_value = False
    allocations = ("carved", "additive")
    fields = ("latent_dim",)
    latent_norm: Any
    k_up_proj: Any
    v_up_proj: Any

    @classmethod
    def settle(cls, config: Any) -> None:
        config.latent_dim = config.latent_dim or config.num_value_groups * config.value_head_dim

    @classmethod
    def state(cls, config: Any) -> Part:
        return Part(1, config.latent_dim, shared=True)

    @classmethod
    def projections(cls, config: Any) -> dict[str, Part]:
        latent, k_rope = super().projections(config).values()
        return {"latent_proj": latent, "k_rope_proj": k_rope}

    @classmethod
    def maps(cls, config: Any) -> dict[str, tuple[int, int]]:
        widths = {"k_up_proj": config.content_dim, "v_up_proj": config.value_head_dim}
        return {name: (width, config.latent_dim) for name, width in widths.items()}

    @classmethod
    def norms(cls, config: Any) -> dict[str, int]:
        return super().norms(config) | ({"latent_norm": config.latent_dim} if config.latent_norm else {})

    def break_even(self) -> float:
        """The number of queries at which expanding every latent costs no more than attending in latent width."""
        config = self.config
        expansion = config.latent_dim * (config.content_dim + config.value_head_dim)
        widening = 2 * config.latent_dim - config.content_dim - config.value_head_dim
        return expansion / widening if widening > 0 else float("inf")

    def project(self, hidden_states: Tensor, rotation: Rotation) -> tuple[Query, Cached]:
        query, (latent, k_rope) = super().project(hidden_states, rotation)
        return query, (self.latent_norm(latent) if self.config.latent_norm else latent, k_rope)

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        latent, config = state.squeeze(-2), self.config
        k_nope = self.k_up_proj(latent).unflatten(-1, (-1, config.content_dim))
        return k_nope, self.v_up_proj(latent).unflatten(-1, (-1, config.value_head_dim))

    def absorb(self, content: Tensor) -> Tensor:
        return absorbed_by(content, per_head(self.k_up_proj, self.config.content_dim, content))

    def values_of(self, attended: Tensor) -> Tensor:
        return torch.einsum(
            "...hc,hdc->...hd", attended, per_head(self.v_up_proj, self.config.value_head_dim, attended)
        )
