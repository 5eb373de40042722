"""How a shape is cut into programs: the one table of tuned numbers. Pure Python, no triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


def power_of_two(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Config:
    """One way to run the decode kernel; `triton/decode.py` explains the words."""

    tile: int  # cached tokens per turn of the loop
    groups: int  # value groups per program
    rows: int  # query rows per group; groups * rows is the height of the tensor-core tile
    queries: int  # query tokens per unit of work
    warps: int
    stages: int  # of the software pipeline; the page look-up takes half of them: (stages - 1) // 2 tiles in flight
    per_sm: int  # programs per multiprocessor, all resident at once
    burst_per_sm: int  # as many instead, where each then reads a single tile
    hopper: int = 0  # 1: the reading kernel is cuda/decode.cu; `groups` are then all of them, shared by the warps

    def ints(self) -> list[int]:
        """For the schema of the torch op, which knows ints and no dataclasses."""
        return [
            self.tile,
            self.groups,
            self.rows,
            self.queries,
            self.warps,
            self.stages,
            self.per_sm,
            self.burst_per_sm,
            self.hopper,
        ]

    @property
    def height(self) -> int:
        return self.groups * self.rows


def lay_out_rows(G: int, R: int, d_h: int, max_seqlen_q: int, max_rows: int, max_width: int) -> tuple[int, int, int]:
    """(groups, rows, queries) of a program.

    The tensor cores take 16 rows at least. Where R * S leaves room, groups up to `max_width` columns in all share a
    program (see decode.py).
    """
    need = power_of_two(R * max_seqlen_q)
    if need <= 16:
        groups = max(1, min(16 // need, max_width // power_of_two(d_h), power_of_two(G)))
        return groups, 16 // groups, max_seqlen_q
    rows = min(need, max(max_rows, power_of_two(R)))
    return 1, rows, min(max_seqlen_q, rows // R)


@functools.lru_cache(maxsize=256)
def choose(
    dtype: torch.dtype, value_dtype: torch.dtype, G: int, R: int, d_h: int, page: int, max_seqlen_q: int, B: int,
    aligned: bool,
) -> Config:  # fmt: skip
    """The configuration of a shape, tuned on an H200. `aligned`: tokens are a multiple of 128 bytes apart.

    Of the batch it depends on `max_seqlen_q`, and the number of programs on B; the order of arithmetic does not
    depend on B, which fixed splits rely on.
    """
    fp8, full = value_dtype == torch.float8_e4m3fn, dtype == torch.float32
    max_rows, max_width = (16 if full and d_h > 128 else 64), 64
    if not full and not fp8:
        # Rows that straddle cache lines are better read whole, by one program; so are the tiles of small pages.
        max_width = 256 if not aligned else 128 if 16 <= page < 64 else 64
    groups, rows, queries = lay_out_rows(G, R, d_h, max_seqlen_q, max_rows, max_width)
    width, height = groups * power_of_two(d_h), groups * rows
    burst = 0
    if full:  # no tensor cores at full precision: correctness, not speed
        tile, warps, stages, per_sm = (32 if width <= 128 else 16), 4, 3 if width <= 256 else 2, 2
    elif height == 16 and width <= 128:
        # One warp: no barrier in the loop, and every reduction stays inside it. Tiles of 8 KiB.
        tile, warps, stages, per_sm = 4096 // width, 1, 5, 3 if B == 1 else 4
        burst = 4 if B == 1 and width <= 64 else 0
        if fp8:
            tile, stages, per_sm, burst = 32, 7, 8, 0
        elif 16 <= page < tile and width == 128:
            tile, stages, per_sm = page, (9 if page == 16 else 5), 8
    elif height == 16 and width <= 256:
        tile, warps, stages, per_sm = 64, 4, 5, 2
    elif height <= 32 and width <= 64:
        tile, warps, stages, per_sm = 32, 1, 7, 8
    elif height <= 32 and width <= 128:
        tile, warps, stages, per_sm = 64, 2, 5, 3
    elif width <= 128:
        tile, warps, stages, per_sm = 64, 4, 5, 3 if width <= 64 else 2
    else:
        tile, warps, stages, per_sm = (32 if width <= 256 else 16), 4 if height < 64 else 8, 5, 1
    return Config(tile, groups, rows, queries, warps, stages, per_sm, burst or per_sm)


SHARED_BYTES = 200 << 10  # of a multiprocessor's shared memory, for tiles in flight


@functools.lru_cache(maxsize=256)
def choose_hopper(
    dtype: torch.dtype, value_dtype: torch.dtype, G: int, R: int, d_h: int, d_r: int, max_seqlen_q: int, row_bytes: int
) -> Config | None:
    """The same for cuda/decode.cu, or None where it has no form for the shape. `row_bytes`: of a token, k_rope included."""
    fp8 = value_dtype == torch.float8_e4m3fn
    size = 1 if fp8 else 2
    halves = (torch.bfloat16,) if fp8 else (torch.bfloat16, torch.float16)
    if dtype not in halves or d_h % 16 or d_h * size % 32 or d_h > 256 or d_r % 8 or row_bytes % 16:
        return None
    queries = max_seqlen_q
    columns = -(-queries * R // 8)
    registers = columns * (d_h // 16) * 6  # of a lane, for one group: its queries and its output
    if registers > 192:
        return None
    together = max(n for n in range(1, G + 1) if G % n == 0 and (n == 1 or n * registers <= 48))
    warps = G // together
    tile = 16
    per_sm = max(1, 8 // warps)
    stages = min(8, SHARED_BYTES // per_sm // (tile * (row_bytes + 16)))
    if warps > 16 or stages < 2:
        return None
    return Config(tile, G, columns * 8, queries, warps, stages, per_sm, per_sm, 1)
