"""The two ways to attend, each over a run of consecutive requests of a step.

Absorbed reads the pages as they lie and suits few new tokens; Expanded builds keys and values of every head and hands
them to FlashAttention, which suits a prompt. `layer` is an attention of `gva.serve.attention`: it knows its maps.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gva import ops
from gva.ops import fast


@dataclass
class Absorbed:
    """Requests whose new tokens attend to the pages.

    tokens        slice of the step's tokens
    block_table   [B, pages], seq_lens [B]: of these requests alone
    cu_seqlens_q  [B+1], or None where every request has max_seqlen_q new tokens
    plan          of the kernel, for all layers of the step; None: it plans for itself
    """

    tokens: slice
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    plan: ops.DecodePlan | None

    def attend(self, layer: Any, q: Tensor, state: Tensor, k_rope: Tensor, out: Tensor) -> None:
        """q [N, H, d_qk] of the step's tokens -> out [N, H, d_h], in place, in the run's tokens."""
        out = out[self.tokens]
        q_absorbed, q_rope = layer.absorb(q[self.tokens])
        attended = out if layer.attends_in_place else torch.empty_like(q_absorbed)
        table, lengths = self.block_table, self.seq_lens
        if self.plan is not None:
            fast.attend(self.plan, q_absorbed, q_rope, layer.pages, table, lengths, layer.scale, attended)
        else:
            starts, longest = self.cu_seqlens_q, self.max_seqlen_q
            values, rope, scales = layer.pages
            ops.paged_attention(
                q_absorbed, q_rope, values, rope, table, lengths, starts, longest, layer.scale,
                value_scales=scales, out=attended)  # fmt: skip
        if not layer.attends_in_place:
            layer.values_of(attended, out)


@dataclass
class Expanded:
    """Requests whose new tokens attend to keys and values of every head.

    cu_seqlens_q, cu_seqlens_k   [B+1] int32; the newest token of a request sees all its keys
    starts_q, starts_k           the same on the host
    slots                        [T] of all tokens of these requests in the cache; None where none was cached before:
                                 the keys are then those of the new tokens, which are at hand
    """

    tokens: slice
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    starts_q: list[int]
    starts_k: list[int]
    slots: Tensor | None

    def __post_init__(self) -> None:
        self.max_seqlen_q, self.max_seqlen_k = longest(self.starts_q), longest(self.starts_k)

    def attend(self, layer: Any, q: Tensor, state: Tensor, k_rope: Tensor, out: Tensor) -> None:
        """q [N, H, d_qk], state [N, G*width], k_rope [N, d_r] of the step's tokens -> out [N, H, d_h], in place, in the
        run's tokens."""
        at = self.tokens
        if self.slots is None:
            k, v = layer.expand(layer.row.grouped(state[at]), k_rope[at])
        else:
            k, v = layer.expand_cached(self.slots)
        attend = self._flash if q.is_cuda else self._plain
        attend(q[at], k, v, layer.scale, out[at])

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        width, padding = v.shape[-1], k.shape[-1] - v.shape[-1]
        if padding:  # kernels want one width; zeros attend to nothing
            v = torch.nn.functional.pad(v, (0, padding))
        flash_attention, version = flash()
        attended = flash_attention(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=self.max_seqlen_q,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_k=self.max_seqlen_k,
            cu_seqlens_k=self.cu_seqlens_k,
            softmax_scale=scale,
            causal=True,
            fa_version=version,
            out=None if padding else out,
        )
        if padding:
            out.copy_(attended[..., :width])

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """One request after another, for the CPU."""
        for i in range(len(self.starts_q) - 1):
            new = slice(self.starts_q[i], self.starts_q[i + 1])
            held = slice(self.starts_k[i], self.starts_k[i + 1])
            S, T = new.stop - new.start, held.stop - held.start
            seen = torch.ones(S, T, dtype=torch.bool, device=q.device).tril(T - S)
            queries, keys, values = (x.transpose(0, 1)[None] for x in (q[new], k[held], v[held]))
            attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, seen, scale=scale)
            out[new] = attended[0].transpose(0, 1)


@functools.cache
def flash() -> tuple[Any, int]:
    """FlashAttention as vLLM ships it, and the version to ask it for: vLLM finds that out anew at every call."""
    from vllm.v1.attention.backends import fa_utils

    return fa_utils.flash_attn_varlen_func, fa_utils.get_flash_attn_version()


def longest(starts: list[int]) -> int:
    return max(last - first for first, last in pairwise(starts))


def flash_takes(dtype: torch.dtype, width: int) -> bool:
    """Whether FlashAttention, as vLLM ships it, takes queries of this kind."""
    return dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256
