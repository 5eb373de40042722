"""The paged cache: pages of cached rows, a block table per sequence.

Pages are handed out as sequences grow and taken back when they end, so memory follows the tokens that exist. One
block table serves all layers; each layer has its own pages (`gva.paged.pages`).

Lengths are known on the host, because the host decides how many tokens come; what kernels read of them lies on the
device and is only ever written from here.
"""

from typing import Any

import torch
from torch import Tensor

from gva.errors import check, check_choice
from gva.ops.config import choose_layout
from gva.paged.pages import LayerPages, pages_of, storage

LAYOUTS = ("rows", "separate")


class OutOfPages(MemoryError):
    """The pool is full; says what was asked for and what is left."""


class PagedCache:
    """Room for `batch` sequences of up to `max_tokens` tokens, in `pages` pages of `page` tokens.

    `layout`: 'rows' or 'separate' (`gva.paged.pages`); None is what was measured to be faster. Keys and values that are
    both cached are separate. `fp8` keeps values as e4m3 with a float32 scale per token and group and the rotated key
    in bfloat16, in one row; for attentions with a decoupled slice.
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
        layout: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check(batch > 0, "batch", batch, "must be positive")
        limit = config.max_position_embeddings
        check(0 < max_tokens <= limit, "max_tokens", max_tokens, f"must lie between 1 and {limit}, the model's context")
        self.config, self.page = config, page
        self.pages_per_sequence = -(-max_tokens // page)
        count = batch * self.pages_per_sequence if pages is None else pages
        self.rows, self.dtype, self.fp8 = [layer.row for layer in config.layer_configs], dtype, fp8
        self.layout = self._choose_layout(layout, batch)
        # Page 0 belongs to nobody: it stands in where a sequence has no page yet, and takes what padding writes.
        self.pools = [
            [
                torch.zeros(count + 1, page, *shape, dtype=kind, device=device)
                for shape, kind in storage(row, self.layout, dtype, fp8)
            ]
            for row in self.rows
        ]
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
        return sum(pool.nbytes for pools in self.pools for pool in pools)

    def _choose_layout(self, asked: str | None, batch: int) -> str:
        if not all(row.packs for row in self.rows):
            rule = f"attention={self.config.attention!r} has no rows of one state and one slice"
            check(asked in (None, "separate"), "layout", asked, f"{rule}: must be 'separate'")
            check(not self.fp8, "fp8", self.fp8, rule)
            return "separate"
        if self.fp8:
            check(asked in (None, "rows"), "layout", asked, "an fp8 token is one packed row: must be 'rows'")
            return "rows"
        if asked is not None:
            check_choice("layout", asked, LAYOUTS)
        return asked or choose_layout(batch)

    def layer(self, index: int) -> LayerPages:
        return pages_of(self.rows[index], self.pools[index], self.dtype)

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
        """Where tokens at positions [N] of sequences [N] lie in a pool; -1 where a position is negative (padding).
        Without `sequences`: one token of each."""
        at = positions.clamp(min=0).long()
        if sequences is None:
            sequences = torch.arange(len(positions), device=positions.device)
        numbers = self.block_table[sequences, at // self.page].long()
        return torch.where(positions >= 0, numbers * self.page + at % self.page, -1)
