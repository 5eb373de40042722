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

from gva.attention.base import Attention, RMSNorm, local, split_heads
from gva.attention.rope import rotate


class LatentAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, latent = config.num_attention_heads, config.latent_dim
        self.latent_proj = nn.Linear(config.hidden_size, latent, bias=False)
        self.latent_norm = RMSNorm(latent, eps=config.rms_norm_eps)
        self.k_rope_proj = nn.Linear(config.hidden_size, config.rope_dim, bias=False)
        self.k_up_proj = nn.Linear(latent, heads * config.content_dim, bias=False)
        self.v_up_proj = nn.Linear(latent, heads * config.value_head_dim, bias=False)

    def break_even(self) -> float:
        """The number of queries at which expanding every latent costs no more than attending in latent width."""
        config = self.config
        expansion = config.latent_dim * (config.content_dim + config.value_head_dim)
        widening = 2 * config.latent_dim - config.content_dim - config.value_head_dim
        return expansion / widening if widening > 0 else float("inf")

    def forward(
        self,
        hidden_states,
        position_embeddings,
        key_position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        attention_form=None,
        **kwargs,
    ):
        form = self.choose_form(attention_form, past_key_values is not None, hidden_states.shape[1])
        q_nope, q_rope = self.split_query(self.queries(hidden_states))
        q_rope = rotate(q_rope, position_embeddings)
        k_rope = rotate(self.k_rope_proj(hidden_states)[:, None], position_embeddings)
        latent = self.latent_norm(self.latent_proj(hidden_states))[:, None]
        k_rope, latent = self.update_cache(past_key_values, k_rope, latent)
        if form == "absorbed":
            up = local(self.k_up_proj.weight).unflatten(0, (-1, self.config.content_dim))
            q_nope = torch.einsum("bhsn,hnc->bhsc", q_nope, up)
            k_nope, v = latent, latent
        else:
            k_nope, v = self.expand(latent.squeeze(1))
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        attended, weights = self.attend(q, k, v, attention_mask, **kwargs)
        if form == "absorbed":
            up = local(self.v_up_proj.weight).unflatten(0, (-1, self.config.value_head_dim))
            attended = torch.einsum("bhsc,hdc->bhsd", attended, up)
        return self.output(attended), weights

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Content keys [B, H, T, d_n] and values [B, H, T, d_h] of latents [B, T, d_c]."""
        k_nope = split_heads(self.k_up_proj(latent), self.config.content_dim)
        return k_nope, split_heads(self.v_up_proj(latent), self.config.value_head_dim)

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        q_nope, q_rope = self.split_query(self.queries(hidden_states))
        k_nope, v = self.expand(self.latent_norm(self.latent_proj(hidden_states)))
        k_rope = self.k_rope_proj(hidden_states)[:, None]
        return {"q_nope": q_nope, "k_nope": k_nope, "q_rope": q_rope, "k_rope": k_rope, "v": v}
