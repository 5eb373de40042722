"""The pages of one layer: where the row that an attention declares lies, and how tokens get in and out.

Two layouts hold the same numbers:

    rows      one pool; the parts of a token side by side, which is what vLLM has and what the Hopper kernel reads; the
              only one for fp8, whose row is packed (`gva.ops.layout`)
    separate  a pool for each part
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gva import ops
from gva.attention import Row
from gva.ops import fast, sequences

Storage = list[tuple[tuple[int, ...], torch.dtype]]


class LayerPages(NamedTuple):
    """parts [P, page, heads, width], the slice [P, page, d_r], in the order of the row; scales [P, page, heads] of an
    fp8 cache.

    `packed` is the same for our kernels, where the row is one state and one slice.
    """

    parts: tuple[Tensor, ...]
    packed: ops.Pages | None
    scales: Tensor | None
    dtype: torch.dtype  # of the model

    @property
    def page(self) -> int:
        return self.parts[0].shape[1]

    def write(self, row: tuple[Tensor, ...], slots: Tensor) -> None:
        """The row of new tokens, [N, ...] each part, at slots [N]; negative slots are padding."""
        if slots.shape[0] < row[0].shape[0]:  # tokens past them pad a graph
            row = tuple(part[: slots.shape[0]] for part in row)
        if self.packed is None:
            self._write_parts(row, slots)
        elif torch.compiler.is_compiling():
            ops.append(row[0], row[1], *self.packed[:2], slots, value_scales=self.scales)
        else:
            fast.append(row[0], row[1], self.packed, slots)

    def _write_parts(self, row: tuple[Tensor, ...], slots: Tensor) -> None:
        if len(row) == 2:  # the second where other attentions have their slice: one launch writes both
            ops.append(row[0], row[1].flatten(1), self.parts[0], self.parts[1].flatten(2), slots)
        else:
            for part, new in zip(self.parts, row, strict=True):
                part.flatten(0, 1)[slots.clamp(min=0)] = new.to(part.dtype)

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:
        """The rows at slots, in the model's precision."""
        return self._at((slots // self.page, slots % self.page))

    def read_pages(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """The rows of whole pages [B, pages], side by side: [B, tokens, ...] each part."""
        return tuple(part.flatten(1, 2) for part in self._at(numbers))

    def read_sequence(self, table: Tensor, length: int) -> tuple[Tensor, ...]:
        """The rows of a sequence on a CPU, side by side: [1, length, ...] each part, good until the next call."""
        found = sequences.gather(self.parts, self.scales, table, length, self.dtype)
        return tuple(part[None] for part in found)

    def _at(self, at: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, ...]:
        row = tuple(part[at] for part in self.parts)
        if self.scales is not None:
            row = (row[0].float() * self.scales[at][..., None], *row[1:])
        return tuple(part.to(self.dtype) for part in row)


def storage(row: Row, layout: str, dtype: torch.dtype, fp8: bool) -> Storage:
    """The shape of one token in each pool, and the dtype of the pool."""
    if layout == "rows":
        (state,), k_rope = row.content, row.rope
        assert k_rope is not None
        width = ops.row_width(state.heads, state.width, k_rope.width, fp8)
        return [((width,), torch.uint8 if fp8 else dtype)]
    content: Storage = [((part.heads, part.width), dtype) for part in row.content]
    return content if row.rope is None else [*content, ((row.rope.width,), dtype)]


def pages_of(row: Row, pools: list[Tensor], dtype: torch.dtype) -> LayerPages:
    """The pages of a layer whose pools are these, [P, page, ...] each, as `storage` describes them."""
    if not row.packs:
        return LayerPages(tuple(pools), None, None, dtype)
    (state,), k_rope = row.content, row.rope
    assert k_rope is not None
    in_rows = len(pools) == 1
    widths = state.heads, state.width, k_rope.width
    packed = ops.row_views(pools[0], *widths) if in_rows else ops.Pages(*pools)
    return LayerPages((packed.values, packed.k_rope), packed, packed.scales, dtype)
