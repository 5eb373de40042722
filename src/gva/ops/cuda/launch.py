"""The launch of decode.cu: shapes and strides in, no tensor value ever read on the host."""

from __future__ import annotations

import functools

import torch

from ..backend import FP8
from ..config import Config, copies, row_bytes
from . import compile

BARRIER_BYTES = 16  # two barriers per stage


def in_rows(value_pages: torch.Tensor, rope_pages: torch.Tensor, value_scales: torch.Tensor | None) -> bool:
    """Whether k_rope (and the scales) of a token lie right behind its values, in one row."""
    start, at = value_pages.data_ptr(), value_pages.shape[2] * value_pages.shape[3] * value_pages.element_size()
    for beside in (rope_pages, value_scales):
        if beside is None:
            continue
        if beside.data_ptr() != start + at or beside.stride(2) != 1 or _steps(beside) != _steps(value_pages):
            return False
        at += beside.shape[2] * beside.element_size()
    return True


def _steps(pages: torch.Tensor) -> list[int]:
    """Bytes from page to page and from token to token, where there is more than one."""
    return [pages.stride(i) * pages.element_size() if pages.shape[i] > 1 else 0 for i in range(2)]


def misfit(value_pages: torch.Tensor, rope_pages: torch.Tensor, value_scales: torch.Tensor | None) -> str | None:
    """What keeps the kernel from reading these pages, or None. The shape itself is `config.choose_hopper`'s."""
    _, page, G, d_h = value_pages.shape
    if value_pages.stride(2) != d_h or not in_rows(value_pages, rope_pages, value_scales):
        return "all that belongs to a token in one row: values, k_rope and scales, one right behind the other"
    if page > 1 and _steps(value_pages)[1] != row_bytes(value_pages.dtype, G, d_h, rope_pages.shape[2]):
        return "rows of a page one right behind the other"
    if value_pages.data_ptr() % 16 or any(step % 16 for step in _steps(value_pages)):
        return "rows that begin at multiples of 16 bytes"
    return None


def read(
    config: Config,
    schedule: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    split_tiles: int,
    units: int,
    shares: int,
    q_absorbed: torch.Tensor,
    q_rope: torch.Tensor,
    value_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    scale_log2: float,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """In the place of triton/decode.py's decode_kernel, for the same schedule and workspace; the pages must fit."""
    size, (_, page, G, d_h) = value_pages.element_size(), value_pages.shape
    variant, threads, shared_bytes = shape_of(
        config, d_h, q_rope.shape[2], G, q_absorbed.shape[1] // G, page, max_seqlen_q if cu_seqlens_q is None else 0,
        split_tiles, lse is not None, value_pages.dtype, q_absorbed.dtype)  # fmt: skip
    arguments = compile.Arguments(
        q_absorbed.data_ptr(),
        q_rope.data_ptr(),
        value_pages.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        None if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),
        schedule.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        part_out.data_ptr(),
        part_lse.data_ptr(),
        *q_absorbed.stride()[:2],
        *q_rope.stride()[:2],
        *(s * size for s in value_pages.stride()[:2]),
        block_table.stride(0),
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        scale_log2,
        units,
        -(-max_seqlen_q // config.queries),
        shares,
    )
    grid = shares, units if split_tiles else 1
    compile.launch(variant, arguments, grid, threads, shared_bytes, q_absorbed.device)


@functools.cache
def shape_of(
    config: Config,
    d_h: int,
    d_r: int,
    G: int,
    R: int,
    page: int,
    uniform: int,
    split_tiles: int,
    has_lse: bool,
    value_dtype: torch.dtype,
    query_dtype: torch.dtype,
) -> tuple[tuple[tuple[str, int], ...], int, int]:
    """What the kernel is compiled for, its threads and its shared memory."""
    row = row_bytes(value_dtype, G, d_h, d_r)
    run, pad = copies(config.tile, row, page)
    defines = {
        "D_H": d_h,
        "D_R": d_r,
        "G": G,
        "R": R,
        "QUERIES": config.queries,
        "UNIFORM_S": uniform,
        "PAGE": page,
        "TILE": config.tile,
        "STAGES": config.stages,
        "GROUPS": G // config.warps,
        "FIXED_TILES": split_tiles,
        "HAS_LSE": int(has_lse),
        "FP8": int(value_dtype == FP8),
        "HALF": int(query_dtype == torch.float16),
        "PER_SM": config.per_sm,
        "RUN": run,
        "PAD": pad,
    }
    tile_bytes = config.tile * row + config.tile // run * pad
    shared_bytes = config.stages * (-(-tile_bytes // 128) * 128 + BARRIER_BYTES)
    return tuple(defines.items()), 32 * (config.warps + 1), shared_bytes
