"""Launches of decode.py's kernels: one cuts the work of a batch into shares, one reads them, one merges their parts."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..backend import FP8
from ..call import Call
from ..config import Config, power_of_two
from ..schedule import Grid, Variant, Work, count_shares, grid_of
from . import decode as kernels
from .remember import Constants, Remembered

launch_plan, launch_decode, launch_merge = map(
    Remembered, (kernels.plan_kernel, kernels.decode_kernel, kernels.merge_kernel)
)

FIXED_MERGE_UNITS = 32  # for which merges of fixed splits are shaped, however many there are
UNIT_COST = 4  # tiles that could be read in the time it takes to begin a unit: query, length, first page
SHARES_PER_PROGRAM = 32  # of the planning kernel


def overlaps_launches(device: torch.device) -> bool:
    """Programmatic dependent launch (sm90+): the merging kernel starts up while the reading kernel ends."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def fill(work: Work, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int) -> None:
    """Writes the schedule. `cu_seqlens_q` None: every sequence has max_seqlen_q queries."""
    units, blocks_per_seq, head_blocks, shares = grid_of(work, seq_lens.shape[0], max_seqlen_q)
    if units == 0:
        return
    uniform = max_seqlen_q if cu_seqlens_q is None else 0
    launch_plan(
        (-(-shares // SHARES_PER_PROGRAM),),
        plan_constants(work.config, uniform, min(256, max(16, power_of_two(units)))),
        work.schedule,
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        units,
        blocks_per_seq,
        count_shares(seq_lens.device, work.config.per_sm, head_blocks),
        shares,
    )


@functools.cache
def plan_constants(config: Config, uniform: int, units: int) -> Constants:
    return Constants(
        UNIFORM_S=uniform,
        QUERIES=config.queries,
        TILE=config.tile,
        UNITS=units,
        SHARES=SHARES_PER_PROGRAM,
        COST=UNIT_COST,
        num_warps=4,
    )


def shared_constants(variant: Variant) -> dict[str, Any]:
    """Of the reading and the merging kernel."""
    config, pdl = variant.config, overlaps_launches(variant.device)
    return {
        "R": variant.R,
        "D_H": variant.d_h,
        "BLOCK_D": power_of_two(variant.d_h),
        "GROUPS": config.groups,
        "QUERIES": config.queries,
        "UNIFORM_S": variant.uniform,
        "TILE": config.tile,
        "FIXED_TILES": variant.split_tiles,
        "HAS_LSE": variant.has_lse,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }


def alignment(tensor: torch.Tensor, *strides: int) -> int:
    """Elements, at most 16 bytes' worth, by which every given stride is divisible."""
    return math.gcd(16 // tensor.element_size(), *strides)


def read(call: Call, work: Work, variant: Variant, grid: Grid) -> None:
    """The parts of all shares; units that lie in one share whole are written to the output."""
    q_absorbed, q_rope, (values, k_rope, scales), batch, _, out, lse = call
    scale_strides: tuple[int, ...] = (0, 0, 0)
    if scales is not None:
        values, scale_strides = values.view(torch.int16), scales.stride()  # pairs of e4m3
    unit_v, unit_k = alignment(values, values.stride(0)), alignment(k_rope, k_rope.stride(0))
    programs = grid.shares * grid.head_blocks
    launch_decode(
        (programs, grid.units) if work.split_tiles else (programs,),
        decode_constants(variant, unit_v, unit_k, values.stride()[1:3], k_rope.stride(1), scale_strides[1:]),
        q_absorbed,
        q_rope,
        values,
        k_rope,
        work.part_lse if scales is None else scales,
        batch.block_table,
        batch.seq_lens,
        batch.seq_lens if batch.cu_seqlens_q is None else batch.cu_seqlens_q,
        work.schedule,
        out,
        work.part_lse if lse is None else lse,
        work.part_out,
        work.part_lse,
        *q_absorbed.stride()[:2],
        *q_rope.stride()[:2],
        values.stride(0) // unit_v,
        k_rope.stride(0) // unit_k,
        scale_strides[0],
        batch.block_table.stride(0),
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        call.scale_log2,
        variant.G,
        grid.units,
        grid.blocks_per_seq,
        grid.head_blocks,
        grid.shares,
    )


@functools.cache
def decode_constants(
    variant: Variant,
    unit_v: int,
    unit_k: int,
    value_strides: tuple[int, ...],
    rope_stride: int,
    scale_strides: tuple[int, ...],
) -> Constants:
    config, d_h, d_r = variant.config, variant.d_h, variant.d_r
    return Constants(
        stride_vt=value_strides[0],
        stride_vg=value_strides[1],
        stride_kt=rope_stride,
        stride_st=scale_strides[0],
        stride_sg=scale_strides[1],
        ROWS=config.rows,
        WHOLE_COLUMNS=d_h == power_of_two(d_h) and variant.G % config.groups == 0,
        D_R=d_r,
        BLOCK_R=max(16, power_of_two(d_r)),
        PAGE=variant.page,
        UNIT_V=unit_v,
        UNIT_K=unit_k,
        HAS_SCALES=variant.value_dtype == FP8,
        PRECISION="ieee" if variant.dtype == torch.float32 else None,
        ASM=not launch_decode.interpreted,
        WIDEN=launch_decode.interpreted and variant.dtype == torch.bfloat16,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        **shared_constants(variant),
    )


def merge(call: Call, work: Work, variant: Variant, grid: Grid) -> None:
    """What the parts come to, and the output of units that have none."""
    out, lse, batch = call.out, call.lse, call.batch
    # The order of a merge follows its shape, which with fixed splits may not depend on the batch.
    several = FIXED_MERGE_UNITS if work.split_tiles else grid.units
    programs, constants = merging(variant, several * grid.head_blocks)
    launch_merge(
        (grid.units, grid.head_blocks * programs),
        constants,
        work.part_out,
        work.part_lse,
        work.schedule,
        batch.seq_lens,
        batch.seq_lens if batch.cu_seqlens_q is None else batch.cu_seqlens_q,
        out,
        work.part_lse if lse is None else lse,
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        variant.G,
        grid.blocks_per_seq,
        grid.head_blocks,
        grid.shares,
    )


@functools.cache
def merging(variant: Variant, several: int) -> tuple[int, Constants]:
    """Programs that merge one head block of a unit, of `several` in all, and what they are compiled for.

    Few sequences come in many parts: one row per program, all parts at once. Many sequences come in few parts.
    """
    rows, block_d = variant.config.groups * variant.config.queries * variant.R, power_of_two(variant.d_h)
    if several * rows <= 64:
        block_h, parts, warps = 1, 128 * 64 // max(64, block_d), 4
    elif several * rows <= 2048:
        block_h, parts, warps = 1, 16, 1
    else:
        block_h, parts, warps = 4, 8 * 64 // max(64, block_d), 1
    block_h = min(block_h, power_of_two(rows))
    return -(-rows // block_h), merge_constants(variant, block_h, max(2, parts), warps)


@functools.cache
def merge_constants(variant: Variant, block_h: int, parts: int, warps: int) -> Constants:
    return Constants(PARTS=parts, BLOCK_H=block_h, num_warps=warps, **shared_constants(variant))
