"""Multi-head latent attention (arXiv 2405.04434): one latent and one shared rotated slice are cached.

Full-rank query; joint latent of width d_c, normalised before it is cached; d_n = d_h - d_r; values d_h wide.

    c        = norm(x W_DKV)          [B, S, d_c]      cached
    k_rope   = rot(x W_r)             [B, 1, S, d_r]   cached
    expanded   k_nope_h = c W_UK_h,  v_h = c W_UV_h
    absorbed   q~_h = q_nope_h W_UK_h^T,  o_h = (softmax(.) c) W_UV_h
"""

from typing import Any

import torch
from torch import Tensor, nn

from gva.attention.base import RMSNorm, local, split_heads
from gva.attention.decoupled import DecoupledAttention


class LatentAttention(DecoupledAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, latent = config.num_attention_heads, config.latent_dim
        self.latent_proj = nn.Linear(config.hidden_size, latent, bias=False)
        self.latent_norm = RMSNorm(latent, eps=config.rms_norm_eps)
        self.k_up_proj = nn.Linear(latent, heads * config.content_dim, bias=False)
        self.v_up_proj = nn.Linear(latent, heads * config.value_head_dim, bias=False)

    def break_even(self) -> float:
        """The number of queries at which expanding every latent costs no more than attending in latent width."""
        config = self.config
        expansion = config.latent_dim * (config.content_dim + config.value_head_dim)
        widening = 2 * config.latent_dim - config.content_dim - config.value_head_dim
        return expansion / widening if widening > 0 else float("inf")

    def state(self, hidden_states: Tensor) -> Tensor:
        return self.latent_norm(self.latent_proj(hidden_states))

    def content(self, state: Tensor) -> tuple[Tensor, Tensor]:
        k_nope = split_heads(self.k_up_proj(state), self.config.content_dim)
        return k_nope, split_heads(self.v_up_proj(state), self.config.value_head_dim)

    def absorb(self, q_nope: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        up = local(self.k_up_proj.weight).unflatten(0, (-1, self.config.content_dim))
        return torch.einsum("bhsn,hnc->bhsc", q_nope, up), state[:, None]

    def values_of(self, attended: Tensor, form: str) -> Tensor:
        if form == "expanded":
            return attended
        up = local(self.v_up_proj.weight).unflatten(0, (-1, self.config.value_head_dim))
        return torch.einsum("bhsc,hdc->bhsd", attended, up)
