"""Launches of the Triton kernels: shapes and strides in, no tensor value ever read on the host."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..config import Config, power_of_two
from . import absorb as absorb_kernels
from . import append as append_kernels
from . import decode as kernels
from . import expand as expand_kernels
from .launcher import Constants, Launcher

INTERPRETED_MULTIPROCESSORS = 3  # Triton's interpreter runs programs one after another: few, but several per sequence

FIXED_MERGE_UNITS = 32  # for which merges of fixed splits are shaped, however many there are

plan_kernel, decode_kernel, merge_kernel = map(
    Launcher, (kernels.plan_kernel, kernels.decode_kernel, kernels.merge_kernel)
)
append_kernel, absorb_kernel, expand_kernel = map(
    Launcher, (append_kernels.append_kernel, absorb_kernels.absorb_kernel, expand_kernels.expand_kernel)
)

LOG2_E = math.log2(math.e)

UNIT_COST = 4  # tiles that could be read in the time it takes to begin a unit: query, length, first page


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1) instead of on a GPU."""
    return not hasattr(kernels.decode_kernel, "cache_key")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Programmatic dependent launch (sm90+): the merging kernel starts up while the reading kernel ends."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass
class Workspace:
    """Buffers of one call or of one plan."""

    schedule: torch.Tensor  # int32, see decode.py
    part_out: torch.Tensor  # float32 [slots, head_blocks, groups * queries * R, block_d]
    part_lse: torch.Tensor  # float32 [slots, head_blocks, groups * queries * R]


def head_blocks(config: Config, G: int) -> int:
    return -(-G // config.groups)


def count_units(config: Config, B: int, max_seqlen_q: int) -> int:
    return B * -(-max_seqlen_q // config.queries)


def count_shares(device: torch.device, per_sm: int, blocks: int) -> int:
    return max(1, multiprocessors(device) * per_sm // blocks)


def allocate(
    config: Config,
    device: torch.device,
    *,
    B: int,
    G: int,
    R: int,
    d_h: int,
    max_seqlen_q: int,
    split_tiles: int,
    max_tokens: int,
) -> Workspace:
    """`split_tiles` = 0: shares planned on the device; else pieces of that many tiles, `max_tokens` at most."""
    blocks, units = head_blocks(config, G), count_units(config, B, max_seqlen_q)
    if split_tiles:
        shares = max(1, -(-max_tokens // (split_tiles * config.tile)))
        slots, size = units * shares, 0
    else:
        shares = count_shares(device, max(config.per_sm, config.burst_per_sm), blocks)
        slots, size = 2 * shares, kernels.HEADER.value + kernels.ENTRY.value * shares + units
    rows = config.groups * config.queries * R
    return Workspace(
        torch.zeros(size, dtype=torch.int32, device=device),
        torch.empty(slots, blocks, rows, power_of_two(d_h), dtype=torch.float32, device=device),
        torch.empty(slots, blocks, rows, dtype=torch.float32, device=device),
    )


def fill_schedule(
    config: Config, workspace: Workspace, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int
) -> None:
    """Cuts the work into shares, on the device. `cu_seqlens_q` None: every sequence has max_seqlen_q queries."""
    units = count_units(config, len(seq_lens), max_seqlen_q)
    if units == 0:
        return
    shares = workspace.part_lse.shape[0] // 2
    per_program = 32
    uniform = max_seqlen_q if cu_seqlens_q is None else 0
    plan_kernel(
        (-(-shares // per_program),),
        plan_constants(config, uniform, min(256, max(16, power_of_two(units))), per_program),
        workspace.schedule,
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        units,
        -(-max_seqlen_q // config.queries),
        count_shares(seq_lens.device, config.per_sm, workspace.part_lse.shape[1]),
        shares,
    )


@functools.cache
def plan_constants(config: Config, uniform: int, units: int, shares: int) -> Constants:
    return Constants(
        UNIFORM_S=uniform,
        QUERIES=config.queries,
        TILE=config.tile,
        UNITS=units,
        SHARES=shares,
        COST=UNIT_COST,
        num_warps=4,
    )


def alignment(tensor: torch.Tensor, *strides: int) -> int:
    """Elements, at most 16 bytes' worth, by which every given stride is divisible."""
    return math.gcd(16 // tensor.element_size(), *strides)


def attend(
    config: Config,
    workspace: Workspace,
    split_tiles: int,
    q_absorbed: torch.Tensor,
    q_rope: torch.Tensor,
    value_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    scale: float,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Reads the cache, then merges. Tensors as in `api.paged_attention`; `out` and `lse` are written."""
    _, H, d_h = q_absorbed.shape
    d_r = q_rope.shape[2]
    page, G = value_pages.shape[1:3]
    blocks, units = head_blocks(config, G), count_units(config, seq_lens.shape[0], max_seqlen_q)
    if units == 0 or q_absorbed.shape[0] == 0:
        return
    slots = workspace.part_lse.shape[0]
    shares = slots // units if split_tiles else slots // 2
    blocks_per_seq = -(-max_seqlen_q // config.queries)
    starts = seq_lens if cu_seqlens_q is None else cu_seqlens_q
    lse_or_any = workspace.part_lse if lse is None else lse
    lse_stride = 0 if lse is None else lse.stride(0)
    scale_log2 = scale * LOG2_E
    uniform = max_seqlen_q if cu_seqlens_q is None else 0
    pdl = overlaps_launches(q_absorbed.device)
    shape = Shape(config, H // G, d_h, uniform, split_tiles, lse is not None, pdl)
    if config.hopper:
        from ..cuda.launch import read

        read(
            config, workspace.schedule, workspace.part_out, workspace.part_lse, split_tiles, units, shares,
            q_absorbed, q_rope, value_pages, rope_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
            scale_log2, value_scales, out, lse)  # fmt: skip
    else:
        if value_scales is not None:
            value_pages = value_pages.view(torch.int16)  # pairs of e4m3
        unit_v, unit_k = alignment(value_pages, value_pages.stride(0)), alignment(rope_pages, rope_pages.stride(0))
        scale_strides = value_scales.stride() if value_scales is not None else (0, 0, 0)
        decode_kernel(
            (shares * blocks, units) if split_tiles else (shares * blocks,),
            decode_constants(
                shape, G, d_r, page, unit_v, unit_k, value_pages.stride()[1:3], rope_pages.stride(1), scale_strides[1:],
                value_scales is not None, q_absorbed.dtype),
            q_absorbed,
            q_rope,
            value_pages,
            rope_pages,
            workspace.part_lse if value_scales is None else value_scales,
            block_table,
            seq_lens,
            starts,
            workspace.schedule,
            out,
            lse_or_any,
            workspace.part_out,
            workspace.part_lse,
            q_absorbed.stride(0),
            q_absorbed.stride(1),
            q_rope.stride(0),
            q_rope.stride(1),
            value_pages.stride(0) // unit_v,
            rope_pages.stride(0) // unit_k,
            scale_strides[0],
            block_table.stride(0),
            out.stride(0),
            out.stride(1),
            lse_stride,
            scale_log2,
            G,
            units,
            blocks_per_seq,
            blocks,
            shares,
        )  # fmt: skip
    # The order of a merge follows its shape, which with fixed splits may not depend on the batch.
    several = FIXED_MERGE_UNITS if split_tiles else units
    programs, constants = merging(shape, several * blocks)
    merge_kernel(
        (units, blocks * programs),
        constants,
        workspace.part_out,
        workspace.part_lse,
        workspace.schedule,
        seq_lens,
        starts,
        out,
        lse_or_any,
        out.stride(0),
        out.stride(1),
        lse_stride,
        G,
        blocks_per_seq,
        blocks,
        shares,
    )


class Shape(NamedTuple):
    """What the reading and the merging kernel are both compiled for."""

    config: Config
    R: int
    d_h: int
    uniform: int  # queries of every sequence, 0 where they differ
    split_tiles: int
    has_lse: bool
    pdl: bool

    def constants(self) -> dict[str, Any]:
        return {
            "R": self.R,
            "D_H": self.d_h,
            "BLOCK_D": power_of_two(self.d_h),
            "GROUPS": self.config.groups,
            "QUERIES": self.config.queries,
            "UNIFORM_S": self.uniform,
            "TILE": self.config.tile,
            "FIXED_TILES": self.split_tiles,
            "HAS_LSE": self.has_lse,
            "PDL": self.pdl,
            **({"launch_pdl": True} if self.pdl else {}),
        }


@functools.cache
def decode_constants(
    shape: Shape,
    G: int,
    d_r: int,
    page: int,
    unit_v: int,
    unit_k: int,
    value_strides: tuple[int, int],
    rope_stride: int,
    scale_strides: tuple[int, int],
    has_scales: bool,
    dtype: torch.dtype,
) -> Constants:
    config, d_h = shape.config, shape.d_h
    return Constants(
        stride_vt=value_strides[0],
        stride_vg=value_strides[1],
        stride_kt=rope_stride,
        stride_st=scale_strides[0],
        stride_sg=scale_strides[1],
        ROWS=config.rows,
        WHOLE_COLUMNS=d_h == power_of_two(d_h) and G % config.groups == 0,
        D_R=d_r,
        BLOCK_R=max(16, power_of_two(d_r)),
        PAGE=page,
        UNIT_V=unit_v,
        UNIT_K=unit_k,
        HAS_SCALES=has_scales,
        PRECISION="ieee" if dtype == torch.float32 else None,
        ASM=not interpreted(),
        WIDEN=interpreted() and dtype == torch.bfloat16,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        **shape.constants(),
    )


@functools.cache
def merging(shape: Shape, several: int) -> tuple[int, Constants]:
    """Programs that merge one head block of a unit, of `several` in all, and what they are compiled for.

    Few sequences come in many parts: one row per program, all parts at once. Many sequences come in few parts.
    """
    rows, block_d = shape.config.groups * shape.config.queries * shape.R, power_of_two(shape.d_h)
    if several * rows <= 64:
        block_h, parts, warps = 1, 128 * 64 // max(64, block_d), 4
    elif several * rows <= 2048:
        block_h, parts, warps = 1, 16, 1
    else:
        block_h, parts, warps = 4, 8 * 64 // max(64, block_d), 1
    block_h = min(block_h, power_of_two(rows))
    return -(-rows // block_h), merge_constants(shape, block_h, max(2, parts), warps)


@functools.cache
def merge_constants(shape: Shape, block_h: int, parts: int, warps: int) -> Constants:
    return Constants(PARTS=parts, BLOCK_H=block_h, num_warps=warps, **shape.constants())


def append(
    values: torch.Tensor,
    k_rope: torch.Tensor,
    value_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Tensors as in `api.append`; one program per new token."""
    N, G, d_h = values.shape
    if N == 0:
        return
    scale_strides = value_scales.stride() if value_scales is not None else (0, 0, 0)
    rotated = cos is not None
    append_kernel(
        (N,),
        append_constants(G, d_h, k_rope.shape[1], value_pages.shape[1], rotated, value_scales is not None),
        values,
        k_rope,
        value_pages,
        rope_pages,
        rope_pages if value_scales is None else value_scales,
        slots,
        positions if rotated else slots,
        cos if rotated else k_rope,
        sin if rotated else k_rope,
        *values.stride()[:2],
        k_rope.stride(0),
        *value_pages.stride()[:3],
        *rope_pages.stride()[:2],
        *scale_strides,
        cos.stride(0) if cos is not None else 0,
    )


@functools.cache
def append_constants(G: int, d_h: int, d_r: int, page: int, rotate: bool, quantise: bool) -> Constants:
    return Constants(
        G=G,
        D_H=d_h,
        D_R=d_r,
        PAGE=page,
        BLOCK_G=power_of_two(G),
        BLOCK_D=power_of_two(d_h),
        BLOCK_R=power_of_two(max(d_r // 2, 1)),
        ROTATE=rotate,
        QUANTISE=quantise,
        num_warps=4,
    )


def absorb(q: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Tensors as in `absorb.absorb_tokens`."""
    (N, H, _), (_, d_n, d_h) = q.shape, maps.shape
    absorbed = torch.empty(N, H, d_h, dtype=q.dtype, device=q.device)
    if N == 0:
        return absorbed
    tile, block_d, constants = absorb_constants(H, d_n, d_h, q.dtype)
    absorb_kernel((-(-N // tile), H, -(-d_h // block_d)), constants, q, maps, absorbed, N, *q.stride()[:2])
    return absorbed


@functools.cache
def absorb_constants(H: int, d_n: int, d_h: int, dtype: torch.dtype) -> tuple[int, int, Constants]:
    """Tokens and columns of a program, and what it is compiled for."""
    tile, block_d = 32, max(16, min(128 if dtype.itemsize == 2 else 64, power_of_two(d_h)))
    return (
        tile,
        block_d,
        Constants(
            H=H,
            D_N=d_n,
            D_H=d_h,
            BLOCK_N=max(16, min(64 if dtype.itemsize == 2 else 32, power_of_two(d_n))),
            BLOCK_D=block_d,
            TILE=tile,
            PRECISION="ieee" if dtype == torch.float32 else None,
            WIDEN=interpreted() and dtype == torch.bfloat16,
            num_warps=4,
        ),
    )


def expand(
    values: torch.Tensor, k_rope: torch.Tensor, maps: torch.Tensor, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors as in `expand.expand_tokens`."""
    N = (values if slots is None else slots).shape[0]
    page = 0 if slots is None else values.shape[1]
    (G, d_h), (H, d_n, _), d_r = values.shape[-2:], maps.shape, k_rope.shape[-1]
    keys, repeated = (torch.empty(N, H, width, dtype=values.dtype, device=values.device) for width in (d_n + d_r, d_h))
    if N == 0:
        return keys, repeated
    if values.stride(-1) != 1 or k_rope.stride(-1) != 1:
        values, k_rope = values.contiguous(), k_rope.contiguous()
    tile, constants = expand_constants(G, H, d_h, d_n, d_r, page, values.dtype)
    expand_kernel(
        (-(-N // tile), G),
        constants,
        values,
        k_rope,
        values if slots is None else slots,
        maps.contiguous(),
        keys,
        repeated,
        N,
        values.stride(0),
        values.stride(-3),
        values.stride(-2),
        k_rope.stride(0),
        k_rope.stride(-2),
    )
    return keys, repeated


@functools.cache
def expand_constants(
    G: int, H: int, d_h: int, d_n: int, d_r: int, page: int, dtype: torch.dtype
) -> tuple[int, Constants]:
    """Tokens of a program, and what it is compiled for."""
    block_d, block_k = max(16, power_of_two(d_h)), max(16, power_of_two(d_n + d_r))
    tile = 64 if max(block_d, block_k) <= 128 and dtype.itemsize == 2 else 16
    return tile, Constants(
        R=H // G,
        H=H,
        D_H=d_h,
        D_N=d_n,
        D_R=d_r,
        PAGE=page,
        BLOCK_D=block_d,
        BLOCK_K=block_k,
        TILE=tile,
        PRECISION="ieee" if dtype == torch.float32 else None,
        WIDEN=interpreted() and dtype == torch.bfloat16,
        num_warps=4,
    )
