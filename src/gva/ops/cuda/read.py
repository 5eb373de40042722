"""The launch of decode.cu: shapes and strides in, no tensor value ever read on the host."""

from __future__ import annotations

import functools

import torch

from ..backend import FP8
from ..call import Call
from ..config import copies
from ..layout import row_bytes
from ..schedule import Grid, Variant, Work
from . import compile

BARRIER_BYTES = 16  # two barriers per stage


def read(call: Call, work: Work, variant: Variant, grid: Grid) -> None:
    """In the place of triton/attend.py's: the same schedule and parts, for pages that fit (`layout.misfit`)."""
    q_absorbed, q_rope, (values, *_), batch, _, out, lse = call
    size = values.element_size()
    defines, threads, shared_bytes = compiled_for(variant)
    arguments = compile.Arguments(
        q_absorbed.data_ptr(),
        q_rope.data_ptr(),
        values.data_ptr(),
        batch.block_table.data_ptr(),
        batch.seq_lens.data_ptr(),
        None if batch.cu_seqlens_q is None else batch.cu_seqlens_q.data_ptr(),
        work.schedule.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        work.part_out.data_ptr(),
        work.part_lse.data_ptr(),
        *q_absorbed.stride()[:2],
        *q_rope.stride()[:2],
        *(s * size for s in values.stride()[:2]),
        batch.block_table.stride(0),
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        call.scale_log2,
        grid.units,
        grid.blocks_per_seq,
        grid.shares,
    )
    programs = grid.shares, grid.units if work.split_tiles else 1
    compile.launch(defines, arguments, programs, threads, shared_bytes, variant.device)


@functools.cache
def compiled_for(variant: Variant) -> tuple[tuple[tuple[str, int], ...], int, int]:
    """What the kernel is compiled for, its threads and its shared memory."""
    config, row = variant.config, row_bytes(variant.value_dtype, variant.G, variant.d_h, variant.d_r)
    run, pad = copies(config.tile, row, variant.page)
    defines = {
        "D_H": variant.d_h,
        "D_R": variant.d_r,
        "G": variant.G,
        "R": variant.R,
        "QUERIES": config.queries,
        "UNIFORM_S": variant.uniform,
        "PAGE": variant.page,
        "TILE": config.tile,
        "STAGES": config.stages,
        "GROUPS": variant.G // config.warps,
        "FIXED_TILES": variant.split_tiles,
        "HAS_LSE": int(variant.has_lse),
        "FP8": int(variant.value_dtype == FP8),
        "HALF": int(variant.dtype == torch.float16),
        "PER_SM": config.per_sm,
        "RUN": run,
        "PAD": pad,
    }
    tile_bytes = config.tile * row + config.tile // run * pad
    shared_bytes = config.stages * (-(-tile_bytes // 128) * 128 + BARRIER_BYTES)
    return tuple(defines.items()), 32 * (config.warps + 1), shared_bytes
