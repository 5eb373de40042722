"""Paged GVA attention on a CPU: one sequence after another, so that what is brought together of its pages is still in
the processor's caches when torch's kernel reads it. The meaning is that of `reference.py`.

The kernel wants keys as wide as values. Values stand for both; scores of the slice, taken before, enter as its mask.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from .call import Call


class Kept(threading.local):
    """Room for the pages of one sequence, of one layer: memory that is new at every layer costs more than reading."""

    def __init__(self) -> None:
        self.room: dict[int, Tensor] = {}

    def of(self, part: int, size: int) -> Tensor:
        """At least so many bytes for a part of the row."""
        if part not in self.room or self.room[part].numel() < size:
            self.room[part] = torch.empty(size, dtype=torch.uint8)
        return self.room[part][:size]


kept = Kept()


def gather(
    parts: tuple[Tensor, ...], scales: Tensor | None, table: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The tokens [length, ...] of each part [P, page, ...] that lie in the pages [pages] of a table: good until the
    next call of this thread. `scales` [P, page, G] are those of the first part, where it is fp8."""
    found = []
    for number, part in enumerate(parts if scales is None else (*parts, scales)):
        shape = len(table), *part.shape[1:]
        room = kept.of(number, math.prod(shape) * part.element_size()).view(part.dtype).view(shape)
        found.append(torch.index_select(part, 0, table, out=room).flatten(0, 1)[:length])
    if scales is not None:
        found[0] = found[0].float() * found.pop()[..., None]
    return tuple(part.to(dtype) for part in found)


def attend(call: Call) -> None:
    """Writes the output [N, H, d_h]; a row that sees nothing is zero."""
    block_table, seq_lens, cu_seqlens_q, S = call.batch
    lengths, page = seq_lens.tolist(), call.pages.values.shape[1]
    starts = [S * b for b in range(len(lengths) + 1)] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, length in enumerate(lengths):
        sees = max(starts[b], starts[b + 1] - length)  # the first query that does
        call.out[starts[b] : sees] = 0
        own = slice(sees, starts[b + 1])
        if own.start < own.stop:
            table, dtype = block_table[b, : -(-length // page)], call.out.dtype
            values, k_rope = gather(call.pages[:2], call.pages.scales, table, length, dtype)
            call.out[own] = _attend(call.q_absorbed[own], call.q_rope[own], values, k_rope, call.scale)


def _attend(q: Tensor, q_rope: Tensor, values: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    """The newest queries [S, H, ...] of a sequence to all its tokens, [T, G, d_h] and [T, d_r] -> [S, H, d_h]."""
    (S, H, _), (T, G, _) = q.shape, values.shape
    scores = (q_rope * scale).transpose(0, 1).flatten(0, 1) @ k_rope.T  # [H S, T]
    if S > 1:
        later = torch.ones(S, T, dtype=torch.bool, device=q.device).triu(T - S + 1)
        scores = scores.view(H, S, T).masked_fill_(later, float("-inf"))
    heads = q.transpose(0, 1).reshape(1, G, -1, q.shape[2])  # of a group, and their queries, side by side
    kept = values.transpose(0, 1)[None]
    out = torch.nn.functional.scaled_dot_product_attention(heads, kept, kept, scores.view(1, G, -1, T), scale=scale)
    return out.view(H, S, -1).transpose(0, 1)
