"""How a batch is cut into shares: the buffers that this takes, and the counts that the kernels of a call agree on.

The words, and the schedule itself, are those of triton/decode.py; cuda/decode.cu reads the same one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .call import Call, Shape
from .config import Config, power_of_two

HEADER, ENTRY = 4, 4  # numbers of the schedule: before its entries, and in each of them
INTERPRETED_MULTIPROCESSORS = 3  # Triton's interpreter runs programs one after another: few, but several per sequence


@dataclass
class Work:
    """How a batch is cut, and its buffers: of one call, or of a plan for many."""

    config: Config
    split_tiles: int  # > 0: fixed pieces of that many tiles, independent of the batch; 0: shares of a schedule
    schedule: torch.Tensor  # int32, filled on the device
    part_out: torch.Tensor  # float32 [slots, head_blocks, groups * queries * R, block_d]
    part_lse: torch.Tensor  # float32 [slots, head_blocks, groups * queries * R]


class Variant(NamedTuple):
    """What the kernels of a call are compiled for."""

    config: Config
    split_tiles: int
    uniform: int
    G: int
    R: int
    d_h: int
    d_r: int
    page: int
    dtype: torch.dtype
    value_dtype: torch.dtype
    has_lse: bool
    device: torch.device

    @classmethod
    def of(cls, call: Call, work: Work) -> Variant:
        q, values = call.q_absorbed, call.pages.values
        (_, H, d_h), (_, page, G, _), d_r = q.shape, values.shape, call.q_rope.shape[2]
        widths, dtypes = (G, H // G, d_h, d_r, page), (q.dtype, values.dtype)
        return cls(work.config, work.split_tiles, call.batch.uniform, *widths, *dtypes, call.lse is not None, q.device)


class Grid(NamedTuple):
    """What a call has how many of."""

    units: int
    blocks_per_seq: int
    head_blocks: int
    shares: int


def grid_of(work: Work, B: int, max_seqlen_q: int) -> Grid:
    slots, head_blocks, _ = work.part_lse.shape
    blocks_per_seq = -(-max_seqlen_q // work.config.queries)
    units = B * blocks_per_seq
    return Grid(units, blocks_per_seq, head_blocks, slots // max(1, units) if work.split_tiles else slots // 2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_shares(device: torch.device, per_sm: int, head_blocks: int) -> int:
    return max(1, multiprocessors(device) * per_sm // head_blocks)


def allocate(config: Config, device: torch.device, shape: Shape, split_tiles: int = 0, max_tokens: int = 0) -> Work:
    """`split_tiles` > 0: pieces of that many tiles, of sequences of `max_tokens` at most."""
    blocks, units = -(-shape.G // config.groups), shape.B * -(-shape.max_seqlen_q // config.queries)
    if split_tiles:
        slots, size = units * max(1, -(-max_tokens // (split_tiles * config.tile))), 0
    else:
        shares = count_shares(device, max(config.per_sm, config.burst_per_sm), blocks)
        slots, size = 2 * shares, HEADER + ENTRY * shares + units
    rows = config.groups * config.queries * shape.R
    return Work(
        config,
        split_tiles,
        torch.zeros(size, dtype=torch.int32, device=device),
        torch.empty(slots, blocks, rows, power_of_two(shape.d_h), dtype=torch.float32, device=device),
        torch.empty(slots, blocks, rows, dtype=torch.float32, device=device),
    )
