"""The ways to attend to pages, each over a stretch of consecutive sequences of a step; for our generator and for vLLM.

    Absorbed   reads the pages as they lie, which suits few new tokens of an attention that absorbs
    Expanded   builds keys and values and hands them to a dense kernel, which suits prompts; where too many are cached,
               part by part, merged by their LSE
    InPlace    FlashAttention-3 on pages of keys and values: how the GQA family decodes
    Gathered   where nothing of the above runs: on a CPU our kernel reads pages of keys and values as they lie; the rest
               is brought together, a copy of the cache at each step

Tokens of all sequences lie one after another, [N]; `out` [N, H, d_h] is written in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gva import ops
from gva.attention import Attention
from gva.attention.base import Cached, JoinedQuery, Query
from gva.attention.rope import Rotation, tables
from gva.ops import decode, dense, fast, flash
from gva.ops.dense import Spans
from gva.paged.pages import LayerPages

EXPANDED_TOKENS = 32768  # that may have keys and values of every head at a time, where earlier tokens are cached
AnyQuery = Query | JoinedQuery


@dataclass
class Absorbed:
    """Sequences whose new tokens attend to the pages.

    tokens        slice of the step's tokens
    block_table   [B, pages], seq_lens [B]: of these sequences alone
    cu_seqlens_q  [B+1], or None where every sequence has max_seqlen_q new tokens
    plan          of the kernel, for all layers of the step; None: it plans for itself
    """

    tokens: slice
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    plan: ops.DecodePlan | None

    def attend(self, attention: Attention, pages: LayerPages, query: AnyQuery, row: Cached, out: Tensor) -> None:
        query, out = query.of(self.tokens), out[self.tokens]
        q_absorbed, q_rope = attention.absorb(query.content), query.rope
        attended = out if attention.state_is_value else torch.empty_like(q_absorbed)
        assert pages.packed is not None
        assert q_rope is not None
        table, lengths, scale = self.block_table, self.seq_lens, attention.scaling
        if self.plan is not None and not torch.compiler.is_compiling():
            fast.attend(self.plan, q_absorbed, q_rope, pages.packed, table, lengths, scale, attended)
        else:
            values, rope, scales = pages.packed
            ops.paged_attention(
                q_absorbed, q_rope, values, rope, table, lengths, self.cu_seqlens_q, self.max_seqlen_q, scale,
                value_scales=scales, out=attended, plan=self.plan)  # fmt: skip
        if not attention.state_is_value:
            out.copy_(attention.values_of(attended))


@dataclass
class Expanded:
    """Sequences whose new tokens attend to keys and values.

    queries, keys   where each sequence begins among the new tokens and among all of them; the newest token of a
                    sequence sees all its keys
    slots           [T] of all tokens of these sequences in the pages; None where none was cached before: the keys are
                    then those of the new tokens, which are at hand
    kernel          for attention to what lies side by side; None: what `gva.ops.dense` chooses
    """

    tokens: slice
    queries: Spans
    keys: Spans
    slots: Tensor | None
    kernel: dense.Kernel | None = None

    def attend(self, attention: Attention, pages: LayerPages, query: AnyQuery, row: Cached, out: Tensor) -> None:
        q, out, scale = query.of(self.tokens).whole, out[self.tokens], attention.scaling
        if self.slots is None or self.keys.starts[-1] <= EXPANDED_TOKENS:
            k, v = self.expand(attention, pages, row, 0, None)
            dense.attend(q, k, v, self.queries, self.keys, scale, causal=True, out=out, kernel=self.kernel)
            return
        out.copy_(self._in_parts(attention, pages, q, row))

    def expand(
        self, attention: Attention, pages: LayerPages, row: Cached, first: int, last: int | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the cached tokens `first` to `last`, or of the new ones where none was cached."""
        slots = None if self.slots is None else self.slots[first:last]
        rotation = None
        if attention.rotates_late:
            rotation = late_rotation(attention, self.keys, row[0])
            rotation = rotation[0][first:last], rotation[1][first:last]
        if attention.looks_back:
            return attention.expand(self._with_before(pages, row, first, last), rotation)
        if slots is None:
            return attention.expand(tuple(part[self.tokens] for part in row), rotation)
        if pages.scales is None:
            return attention.expand_at(pages.parts, slots, rotation)
        return attention.expand(pages.read(slots), rotation)

    def _with_before(self, pages: LayerPages, row: Cached, first: int, last: int | None) -> Cached:
        """The rows of these tokens and, as one more part, the content of the token before each in its sequence."""
        begins = torch.zeros(self.keys.starts[-1], dtype=torch.bool, device=row[0].device)
        begins[self.keys.on_device[:-1].long()] = True
        if self.slots is None:
            rows = tuple(part[self.tokens] for part in row)
            before = rows[0].roll(1, 0)
        else:
            rows, (before, *_) = pages.read(self.slots[first:last]), pages.read(self.slots.roll(1)[first:last])
        return (*rows, before.masked_fill(begins[first:last, None, None], 0))

    def _in_parts(self, attention: Attention, pages: LayerPages, q: Tensor, row: Cached) -> Tensor:
        """One sequence whose earlier tokens are too many to have keys at a time: the new ones attend to themselves,
        then to one part of the earlier ones after another."""
        assert len(self.keys.starts) == 2, "only a sequence alone may be so long"
        total = self.keys.starts[-1]
        held = total - len(q)

        def attended(first: int, last: int) -> tuple[Tensor, Tensor | None]:
            """By the new tokens, to those from `first` to `last`: one part at a time has keys."""
            k, v = self.expand(attention, pages, row, first, last)
            keys = Spans([0, last - first], torch.tensor([0, last - first], dtype=torch.int32, device=q.device))
            causal, scale = first == held, attention.scaling
            return dense.attend(q, k, v, self.queries, keys, scale, causal, with_lse=True, kernel=self.kernel)

        out, lse = attended(held, total)
        for first in range(0, held, EXPANDED_TOKENS):
            other, other_lse = attended(first, min(held, first + EXPANDED_TOKENS))
            assert lse is not None
            assert other_lse is not None
            out, lse = ops.merge_states(out, lse, other, other_lse)
        return out


@dataclass
class InPlace:
    """One new token, or S of them, in every sequence of the cache, against pages of keys and values."""

    block_table: Tensor
    seq_lens: Tensor
    plan: flash.FlashPlan

    def attend(self, attention: Attention, pages: LayerPages, query: AnyQuery, row: Cached, out: Tensor) -> None:
        keys, values = pages.parts
        q, scale = query.content, attention.scaling
        flash.decode(q, keys, values, self.seq_lens, self.block_table, self.plan, scale, out)


@dataclass
class Gathered:
    """One new token in every sequence of the cache; how long they are, only the device knows."""

    block_table: Tensor
    seq_lens: Tensor

    def attend(self, attention: Attention, pages: LayerPages, query: AnyQuery, row: Cached, out: Tensor) -> None:
        parts = pages.parts
        if attention.row(attention.config).has_keys and decode.takes(query.content, *parts):
            k_rope = parts[2] if len(parts) > 2 else None
            table, lengths, scale = self.block_table, self.seq_lens, attention.scaling
            decode.pages(query.content, query.rope, parts[0], k_rope, parts[1], table, lengths, scale, out)
            return
        q = query.whole
        if not q.is_cpu or torch.compiler.is_compiling():
            held = pages.read_pages(self.block_table.long())
            seen = torch.arange(held[0].shape[1], device=q.device) < self.seq_lens[:, None]
            out.copy_(self._attend(attention, q, held, seen[:, None, None]))
            return
        # One after another: what was brought together is then still in the processor's caches.
        for b, length in enumerate(self.seq_lens.tolist()):
            held = pages.read_sequence(self.block_table[b, : -(-length // pages.page)], length)
            out[b] = self._attend(attention, q[b : b + 1], held, None)[0] if length else 0

    def _attend(self, attention: Attention, q: Tensor, held: Cached, seen: Tensor | None) -> Tensor:
        """q [B, H, d_qk] to what is held [B, T, ...], where it is seen [B, 1, 1, T] -> [B, H, d_h]."""
        at = torch.arange(held[0].shape[1], device=q.device)
        rotation = tables(attention.config, at[None], q.dtype) if attention.rotates_late else None
        k, v = (x.transpose(1, 2) for x in attention.expand(held, rotation))
        v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
        q = q.unflatten(1, (k.shape[1], -1))  # heads that read the same key
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=attention.scaling)
        return attended.nan_to_num().flatten(1, 2)  # a row that sees nothing gives zeros


Stretch = Absorbed | Expanded | InPlace | Gathered


def attend(
    attention: Attention,
    pages: LayerPages,
    query: AnyQuery,
    row: Cached,
    slots: Tensor,
    stretches: Sequence[Stretch],
    out: Tensor,
) -> None:
    """Write the row of the new tokens, then attend: query of [N] tokens -> out [N, H, d_h]."""
    pages.write(row, slots)
    for stretch in stretches:
        stretch.attend(attention, pages, query, row, out)


def late_rotation(attention: Attention, keys: Spans, like: Tensor) -> Rotation:
    """Of keys that lie one sequence after another, by their place in the sequence."""
    starts = keys.on_device.long()
    lengths = starts[1:] - starts[:-1]
    first = torch.repeat_interleave(starts[:-1], lengths, output_size=keys.starts[-1])
    return tables(attention.config, torch.arange(keys.starts[-1], device=like.device) - first, like.dtype)


def slots_of(block_table: Tensor, keys: Spans, page: int) -> Tensor:
    """Where all tokens of all sequences lie, one sequence after another: [T], without waiting for the device."""
    total = keys.starts[-1]
    lengths = (keys.on_device[1:] - keys.on_device[:-1]).long()
    sequences = torch.arange(len(lengths), device=lengths.device)
    sequence = torch.repeat_interleave(sequences, lengths, output_size=total)
    position = torch.arange(total, device=lengths.device) - keys.on_device[sequence]
    return block_table[sequence, position // page].long() * page + position % page


def together(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Which sequences, first to last, attend expanded at a time: as many as may have keys of every head; one that is
    longer goes alone."""
    first = 0
    while first < len(lengths):
        last, total = first, 0
        while last < len(lengths) and (last == first or total + lengths[last] <= EXPANDED_TOKENS):
            total += lengths[last]
            last += 1
        yield first, last
        first = last
