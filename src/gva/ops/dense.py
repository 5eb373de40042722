"""Attention to keys and values that lie side by side, with its LSE, so that parts of a context can be merged.

FlashAttention-3 where it was loaded, else torch's kernels on a GPU, else plain torch.
"""

import torch
from torch import Tensor

from . import flash


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q [B, H, S, d], k [B, H or G, T, d], v [B, H or G, T, w] -> out [B, H, S, w], lse [B, H, S] (natural log).

    `causal`: query i sees keys up to T - S + i. k and v have equally many heads.
    """
    if flash.supports(q, k, v):
        return flash.dense(q, k, v, scale, causal)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    square = q.shape[2] == k.shape[2] or not causal  # torch aligns a causal mask to the first key
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3] and square:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    high = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(high) * scale
    if causal:
        S, T = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(S, T, dtype=torch.bool, device=q.device).triu(T - S + 1), float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]).to(v.dtype) @ v, lse
