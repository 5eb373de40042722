"""Which kernel reads a shape, and how it is cut into programs: the one table of tuned numbers. No triton here."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import torch

from .backend import FP8, missing_hopper
from .call import Shape
from .layout import row_bytes


def power_of_two(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def choose_layout(batch: int) -> Literal["rows", "separate"]:
    """How a cache for `batch` sequences lays out its tokens.

    Rows are what vLLM has, and what the Hopper kernel reads. A single sequence is read faster from separate pages of
    values and of k_rope (32k tokens on an H200: 10.6 against 12.7 us).
    """
    return "separate" if batch == 1 else "rows"


class Config(NamedTuple):
    """One way to run the decode kernel; `triton/decode.py` explains the words."""

    tile: int  # cached tokens per turn of the loop
    groups: int  # value groups per program
    rows: int  # query rows per group; groups * rows is the height of the tensor-core tile
    queries: int  # query tokens per unit of work
    warps: int
    stages: int  # tiles in flight; of Triton's pipeline the page look-up takes half: (stages - 1) // 2 tiles
    per_sm: int  # programs per multiprocessor, all resident at once
    burst_per_sm: int  # as many instead, where each then reads a single tile
    hopper: int = 0  # 1: the reading kernel is cuda/decode.cu; `groups` are then all of them, shared by the warps

    @property
    def impl(self) -> str:
        return "cuda" if self.hopper else "triton"


def lay_out_rows(shape: Shape, max_rows: int, max_width: int) -> tuple[int, int, int]:
    """(groups, rows, queries) of a program.

    The tensor cores take 16 rows at least. Where R * S leaves room, groups up to `max_width` columns in all share a
    program (see decode.py).
    """
    need = power_of_two(shape.R * shape.max_seqlen_q)
    if need <= 16:
        groups = max(1, min(16 // need, max_width // power_of_two(shape.d_h), power_of_two(shape.G)))
        return groups, 16 // groups, shape.max_seqlen_q
    rows = min(need, max(max_rows, power_of_two(shape.R)))
    return 1, rows, min(shape.max_seqlen_q, rows // shape.R)


@functools.lru_cache(maxsize=256)
def choose_triton(shape: Shape, aligned: bool) -> Config:
    """The configuration of a shape, tuned on an H200. `aligned`: tokens are a multiple of 128 bytes apart.

    Of the batch it depends on `max_seqlen_q`, and the number of programs on B; the order of arithmetic does not
    depend on B, which fixed splits rely on.
    """
    B, page, fp8, full = shape.B, shape.page, shape.value_dtype == FP8, shape.dtype == torch.float32
    max_rows, max_width = (16 if full and shape.d_h > 128 else 64), 64
    if not full and not fp8:
        # Rows that straddle cache lines are better read whole, by one program; so are the tiles of small pages.
        max_width = 256 if not aligned else 128 if 16 <= page < 64 else 64
    groups, rows, queries = lay_out_rows(shape, max_rows, max_width)
    width, height = groups * power_of_two(shape.d_h), groups * rows
    burst = 0
    if full:  # no tensor cores at full precision: correctness, not speed
        # With more than 64 numbers of the output to a thread the compiler spills them, and takes six times as long.
        warps = min(16, max(4, height * width // (64 * 32)))
        tile, stages, per_sm = (32 if width <= 128 else 16), 3 if width <= 256 else 2, 2
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


SHARED_BYTES = 212 << 10  # of a multiprocessor's shared memory, for the tiles in flight
TILE_BYTES = 72 << 10  # at most
MAX_HOPPER_WARPS = 16


def copies(tile: int, row: int, page: int) -> tuple[int, int]:
    """Tokens of one page that one copy takes, and the bytes left free after them in shared memory.

    There the 8 rows of a product should begin in different banks of 16 bytes, of which there are 8. Two rows in one
    bank do not slow the kernel down. Many copies do, and copies to places that are not a multiple of 32 bytes.
    """
    in_one_bank = math.gcd(row // 16, 8)
    if in_one_bank <= 2:
        return math.gcd(tile, page), 0
    run = math.gcd(4, page) if in_one_bank == 4 else 1
    return run, 32 if run > 1 else 16


@functools.lru_cache(maxsize=256)
def choose_hopper(shape: Shape) -> Config | None:
    """The same for cuda/decode.cu and tokens in rows, tuned on an H200; None where it has no form for the shape."""
    B, _, G, d_h, d_r, page, dtype, value_dtype, max_seqlen_q = shape
    fp8, row = value_dtype == FP8, row_bytes(value_dtype, G, d_h, d_r)
    size, halves = (1, (torch.bfloat16,)) if fp8 else (2, (torch.bfloat16, torch.float16))
    if dtype not in halves or d_h % 16 or d_h * size % 32 or d_r % 8 or row % 16 or G > MAX_HOPPER_WARPS:
        return None
    columns = -(-max_seqlen_q * shape.R // 8)
    if columns > 2 or columns * d_h > 256:  # the queries and the output of a group are held in registers, by one warp
        return None
    few = columns > 1 or B == 1  # large tiles cost registers, and leave nothing for other multiprocessors to do
    tile = 16
    while tile < (32 if few else 64) and 2 * tile * row <= TILE_BYTES // columns:
        if 2 * tile // copies(2 * tile, row, page)[0] > 32:  # one by each lane
            break
        tile *= 2
    warps_per_sm = 8 if columns > 1 or tile == 64 else 16
    stage = tile * (row + 16)
    per_sm = 1 if B == 1 else max(1, min(warps_per_sm // G, SHARED_BYTES // (3 * stage)))
    stages = min(8, SHARED_BYTES // per_sm // stage)
    return Config(tile, G, columns * 8, max_seqlen_q, G, stages, per_sm, per_sm, 1) if stages >= 2 else None


def pick(impl: str | None, device: torch.device, shape: Shape, row_stride: int, in_rows: bool) -> Config:
    """The kernel and its configuration. `impl` None: the Hopper one where it can run and was measured to be faster.

    row_stride    elements from one token to the next
    in_rows       whether k_rope and scales of a token lie right behind its values
    """
    if impl != "triton":
        hopper, lacking = choose_hopper(shape) if in_rows else None, missing_hopper(device)
        # One long sequence of wide rows: Triton's programs read single groups, and there are more of them.
        narrow = row_bytes(shape.value_dtype, shape.G, shape.d_h, shape.d_r) <= 1024
        if hopper is not None and lacking is None and (impl == "cuda" or shape.B > 1 or narrow):
            return hopper
        if impl == "cuda":
            raise RuntimeError(
                f"impl='cuda' needs {lacking or 'a shape and rows that it can read (gva.ops.config.choose_hopper)'}; "
                "impl='triton' and impl='reference' know more"
            )
    return choose_triton(shape, row_stride * shape.value_dtype.itemsize % 128 == 0)
