"""The paged cache: pages of cached rows, a block table per sequence, and the writes of new tokens.

Pages are handed out as sequences grow and taken back when they end, so memory follows the tokens that exist. One
block table serves all layers; each layer has its own pools.

    gva, gta   values [P, page, G, d_h]   and one rotated key [P, page, d_r]
    mla        latent [P, page, 1, d_c]   and one rotated key [P, page, d_r]
    gqa family keys   [P, page, G, d_h]   and values [P, page, G, d_h]
    ordinary-RoPE gva and shared KV: values [P, page, G, d_h] alone, keys being rebuilt from them

Lengths are known on the host, because the host decides how many tokens come; what kernels read of them lies on the
device and is only ever written from here.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gva import ops
from gva.errors import check
from gva.ops import dense, flash

EXPANDED_TOKENS = 16384  # of a prefix: how many cached tokens have keys and values per head at a time


class OutOfPages(MemoryError):
    """The pool is full; says what was asked for and what is left."""


def stream_shapes(config: Any) -> list[tuple[int, ...]]:
    """The shape of one token in each pool of a layer."""
    values = (config.num_value_groups, config.value_head_dim)
    if config.attention == "mla":
        return [(1, config.latent_dim), (config.rope_dim,)]
    if config.positional == "decoupled":
        return [values, (config.rope_dim,)]
    return [values] if config.caches_values_only else [values, values]


class PagedCache:
    """Room for `batch` sequences of up to `max_tokens` tokens, in `pages` pages of `page` tokens.

    `fp8` keeps values as e4m3 with a float32 scale per token and group, the rotated key in bfloat16, all in one row
    (`gva.ops.layout`); for attentions with a decoupled slice.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        max_tokens: int,
        *,
        page: int = 64,
        pages: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fp8: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        check(batch > 0, "batch", batch, "must be positive")
        limit = config.max_position_embeddings
        check(0 < max_tokens <= limit, "max_tokens", max_tokens, f"must lie between 1 and {limit}, the model's context")
        self.config, self.page = config, page
        self.pages_per_sequence = -(-max_tokens // page)
        count = batch * self.pages_per_sequence if pages is None else pages
        shapes, self.fp8 = stream_shapes(config), fp8
        if fp8:
            check(config.absorbs, "fp8", fp8, f"has no row format for positional={config.positional!r}")
            G, width = shapes[0]
            shapes, dtype = [(ops.packed_row_bytes(G, width, config.rope_dim),)], torch.uint8
        # Page 0 belongs to nobody: it stands in where a sequence has no page yet, and takes what padding writes.
        pool = (config.num_hidden_layers, count + 1, page)
        self.pools = [torch.zeros(*pool, *shape, dtype=dtype, device=device) for shape in shapes]
        self.block_table = torch.zeros(batch, self.pages_per_sequence, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.lengths = [0] * batch
        self.owned: list[list[int]] = [[] for _ in range(batch)]
        self.pages = count
        self.free = list(range(count, 0, -1))

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def layer(self, index: int) -> list[Tensor]:
        """The pools of one layer; of an fp8 cache, the values, the rotated keys and the scales in its rows."""
        if self.fp8:
            G, width = stream_shapes(self.config)[0]
            return list(ops.packed_views(self.pools[0][index], G, width, self.config.rope_dim))
        return [pool[index] for pool in self.pools]

    def reserve(self, counts: list[int]) -> None:
        """Make room for so many more tokens of each sequence; all of them or, out of pages, none."""
        wanted = []
        for sequence, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            needed = -(-(length + count) // self.page)
            fits = needed <= self.pages_per_sequence
            check(fits, f"tokens of sequence {sequence}", length + count, "exceed max_tokens")
            wanted += [sequence] * (needed - len(self.owned[sequence]))
        if len(wanted) > len(self.free):
            raise OutOfPages(f"{len(wanted)} pages of {self.page} tokens are needed, {len(self.free)} are free")
        if not wanted:
            return
        given = [self.free.pop() for _ in wanted]
        columns = []
        for sequence, number in zip(wanted, given, strict=True):
            columns.append(len(self.owned[sequence]))
            self.owned[sequence].append(number)
        where = torch.tensor([wanted, columns], device=self.block_table.device)
        self.block_table[where[0], where[1]] = torch.tensor(given, dtype=torch.int32, device=self.block_table.device)

    def advance(self, counts: list[int]) -> None:
        """Count new tokens as cached, on the host and on the device."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.seq_lens.add_(torch.tensor(counts, dtype=torch.int32, device=self.seq_lens.device))

    def release(self, sequence: int) -> None:
        """End a sequence and take its pages back."""
        self.free += reversed(self.owned[sequence])
        self.owned[sequence] = []
        self.lengths[sequence] = 0
        self.seq_lens[sequence] = 0
        self.block_table[sequence] = 0

    def slots(self, positions: Tensor, sequences: Tensor | None = None) -> Tensor:
        """Where tokens at positions [B, S] of all sequences, or of these, lie in a pool; -1 where a position is
        negative (padding)."""
        at = positions.clamp(min=0).long()
        table = self.block_table if sequences is None else self.block_table[sequences]
        numbers = table.gather(1, at // self.page).long()
        return torch.where(positions >= 0, numbers * self.page + at % self.page, -1)

    def write(self, pools: list[Tensor], slots: Tensor, *rows: Tensor) -> None:
        """Rows of new tokens [N, ...], one tensor per pool, into slots [N] of a layer; negative slots are skipped."""
        if self.config.positional == "decoupled":
            scales = pools[2] if self.fp8 else None
            ops.append(rows[0], rows[1], pools[0], pools[1], slots, value_scales=scales)
        elif len(pools) == 2:  # whole values where a decoupled attention has its slice: one launch writes both
            ops.append(rows[0], rows[1].flatten(1), pools[0], pools[1].flatten(2), slots)
        else:
            pools[0].flatten(0, 1)[slots.clamp(min=0)] = rows[0].to(pools[0].dtype)

    def gather(
        self, pools: list[Tensor], sequences: Tensor | None = None, first: int = 0, last: int | None = None
    ) -> list[Tensor]:
        """Rows of all sequences, or of these, in the pools of a layer, side by side, [B, tokens, ...]: those in pages
        `first` to `last`."""
        table = self.block_table if sequences is None else self.block_table[sequences]
        table = table[:, first:last].long()
        rows = [pool[table].flatten(1, 2) for pool in pools]
        if self.fp8:
            values, k_rope, scales = rows
            return [values.to(k_rope.dtype) * scales[..., None].to(k_rope.dtype), k_rope]
        return rows


@dataclass
class PagedStep:
    """One forward pass of new tokens on a paged cache; layers use it in place of a HuggingFace cache.

    slots      [B, S] where the new tokens go, -1 for padding.
    pools      of the layer that it is handed to; not the number of a layer, so that all compile to one graph.
    prefix     of a prefill: the tokens, as many for every sequence and a multiple of the page, that are cached before
               the new ones. The new tokens attend to one another and to the prefix, both in the expanded form. None is
               a decode step: every sequence has S new tokens, counted in seq_lens, which attend to all its pages.
    sequences  [B] which sequences of the cache these are; None for all.
    plan       of the kernel, made once per decode step for all layers: ours, or FlashAttention's metadata.
    """

    cache: PagedCache
    slots: Tensor
    prefix: int | None = None
    sequences: Tensor | None = None
    plan: Any = None
    pools: list[Tensor] = field(default_factory=list)

    def of_layer(self, index: int) -> "PagedStep":
        return replace(self, pools=self.cache.layer(index))

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write what a layer caches of the new tokens, [B, heads, S, width]; returns it, not the past."""
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (keys, values)]
        shapes = stream_shapes(self.cache.config)
        if self.cache.config.positional == "decoupled":  # cached as one head: the rotated key, then the state
            rows = [rows[1].view(-1, *shapes[0]), rows[0].squeeze(1)]
        elif self.cache.config.caches_values_only:  # the values are where a HuggingFace cache has its keys
            rows = [rows[0].view(-1, *shapes[0])]
        self.cache.write(self.pools, self.slots.flatten(), *rows)
        return keys, values

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries q [B, H, S, d_qk] to all tokens of their sequences: [B, H, S, width]. k and v are those of the new
        tokens, [B, H or G, S, ...]; a decode step finds them in the pages instead."""
        if self.prefix is None:
            return self._decode(module, q)
        if self.prefix == 0 and not flash.supports(q, k, v):
            return module.attend(q, k, v, None)[0]
        out, lse = dense.attend(q, *same_heads(k, v), module.scaling, causal=True)
        pages, step = self.prefix // self.cache.page, max(1, EXPANDED_TOKENS // (len(q) * self.cache.page))
        for first in range(0, pages, step):
            k, v = same_heads(*self._cached(module, q.dtype, first, min(pages, first + step)))
            out, lse = ops.merge_states(out, lse, *dense.attend(q, k, v, module.scaling, causal=False))
        return out

    def _cached(self, module: Any, dtype: torch.dtype, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the cached tokens in these pages, [B, H or G, T, ...]."""
        cache, config = self.cache, self.cache.config
        rows = [x.to(dtype) for x in cache.gather(self.pools, self.sequences, first, last)]
        if config.positional == "decoupled":
            return module.expand(rows[0].flatten(2), rows[1][:, None])
        held = [x.transpose(1, 2) for x in rows]
        if config.caches_values_only:
            return module.keys_of_slots(held[0], first * cache.page), held[0]
        return held[0], held[1]

    def _decode(self, module: Any, q: Tensor) -> Tensor:
        """Queries, absorbed where that is possible, against all pages."""
        cache, config = self.cache, self.cache.config
        if config.positional != "decoupled":
            return self._attend_gathered(module, q) if self.plan is None else self._attend_flash(module, q)
        values, k_rope, *scales = self.pools
        q_absorbed, q_rope = q.transpose(1, 2).split((values.shape[-1], config.rope_dim), dim=-1)
        out = ops.paged_attention(
            q_absorbed.flatten(0, 1),
            q_rope.flatten(0, 1),
            values,
            k_rope,
            cache.block_table,
            cache.seq_lens,
            None,
            q.shape[2],
            module.scaling,
            value_scales=scales[0] if scales else None,
            plan=self.plan,
        )
        assert isinstance(out, Tensor)
        return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)

    def _attend_flash(self, module: Any, q: Tensor) -> Tensor:
        """The GQA family through FlashAttention-3, on the pages as they are."""
        rows = q.transpose(1, 2).flatten(0, 1)
        keys, values = self.pools
        out = flash.decode(rows, keys, values, self.cache.seq_lens, self.cache.block_table, self.plan, module.scaling)
        return out.unflatten(0, (len(q), -1)).transpose(1, 2)

    def _attend_gathered(self, module: Any, q: Tensor) -> Tensor:
        """Attentions without a kernel of ours: their rows are brought together, which costs a copy per step."""
        held = [rows.transpose(1, 2) for rows in self.cache.gather(self.pools)]
        k, v = held if len(held) == 2 else (module.keys_of_slots(held[0]), held[0])
        slots = torch.arange(v.shape[2], device=v.device)
        S = q.shape[2]
        newest = self.cache.seq_lens[:, None] - S + torch.arange(S, device=v.device)
        seen = slots <= newest[:, :, None]  # [B, S, T]; a row that sees nothing gives zeros
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None], scale=module.scaling)
        return out.nan_to_num()


def same_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys per head and values per group: values are repeated, since kernels want as many of one as of the other."""
    return k, v.repeat_interleave(k.shape[1] // v.shape[1], dim=1) if k.shape[1] != v.shape[1] else v
