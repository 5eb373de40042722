"""Attention to keys and values that lie side by side, sequences one after another; with its LSE where parts of a
context are to be merged.

FlashAttention-3 where it was loaded, else torch's kernel on a GPU, else plain torch.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from . import flash


class Spans(NamedTuple):
    """Where sequences begin, and the last ends, among tokens that lie one after another: on the host and on the
    device, [B+1] int32."""

    starts: list[int]
    on_device: Tensor

    @property
    def longest(self) -> int:
        return max(last - first for first, last in pairwise(self.starts))


# kernel(q, k, v, queries, keys, scale, causal, out) -> out, lse [H, N]; one width of heads, `out` None: a new tensor
Kernel = Callable[[Tensor, Tensor, Tensor, Spans, Spans, float, bool, Tensor | None], tuple[Tensor, Tensor]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, causal: bool,
    out: Tensor | None = None, with_lse: bool = False, kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """q [N, H, d], k [T, H or G, d], v [T, H or G, w] -> out [N, H, w] and, where asked, lse [N, H] (natural log).

    `causal`: the newest query of a sequence sees all its keys. k and v have equally many heads. `kernel`: another than
    is chosen here, of those that a GPU has.
    """
    kernel = kernel or choose(q, k)
    if kernel is None:
        return _plain(q, k, v, queries, keys, scale, causal, out, with_lse)
    width, padding = v.shape[-1], k.shape[-1] - v.shape[-1]
    if padding:  # kernels want one width; zeros attend to nothing
        v = torch.nn.functional.pad(v, (0, padding))
    attended, lse = kernel(q, k, v, queries, keys, scale, causal, None if padding else out)
    attended = attended[..., :width] if padding else attended
    if out is not None and (padding or attended.data_ptr() != out.data_ptr()):
        out.copy_(attended)
    return attended if out is None else out, lse.transpose(0, 1) if with_lse else None


def choose(q: Tensor, k: Tensor) -> Kernel | None:
    if (
        q.device.type != "cuda"
        or q.dtype not in (torch.bfloat16, torch.float16)
        or k.shape[-1] > 256
        or k.shape[-1] % 8
    ):
        return None
    return flash.varlen if flash.available(q.device) else _torch_flash


def _torch_flash(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, causal: bool, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    attended, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.on_device, keys.on_device, queries.longest, keys.longest, 0.0, causal, False, scale=scale
    )
    return attended, lse


def _plain(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, causal: bool, out: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One sequence after another."""
    H = q.shape[1]
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    high = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:2], dtype=high, device=q.device) if with_lse else None
    for (a, b), (c, d) in zip(pairwise(queries.starts), pairwise(keys.starts), strict=True):
        S, T = b - a, d - c
        own_q, own_k, own_v = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        own_k, own_v = (x.repeat_interleave(H // x.shape[0], dim=0) for x in (own_k, own_v))
        seen = torch.ones(S, T, dtype=torch.bool, device=q.device).tril(T - S) if causal else None
        if lse is None:
            attended = torch.nn.functional.scaled_dot_product_attention(
                own_q[None], own_k[None], own_v[None], seen, scale=scale
            )[0]
        else:
            scores = (own_q @ own_k.mT).to(high) * scale
            if seen is not None:
                scores = scores.masked_fill(~seen, float("-inf"))
            lse[a:b] = scores.logsumexp(-1).transpose(0, 1)
            attended = torch.exp(scores - lse[a:b].transpose(0, 1)[..., None]).to(v.dtype) @ own_v
        out[a:b] = attended.transpose(0, 1)
    return out, lse
