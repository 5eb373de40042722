"""The call of decode.c: pointers and strides, and threads that take its units."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from ..call import LOG2_E, Batch
from . import compile

DTYPES = (torch.float32, torch.bfloat16)
LANES, PIECE = 16, 1024  # the widest vectors, and decode.c's pieces of a sequence
ROWS = 64  # of a group, that a unit has at most, where one query has fewer


class Arguments(ctypes.Structure):
    """decode.c's struct of the same name."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in (
            "q", "q_rope", "keys", "k_rope", "values", "table", "lengths", "starts", "mask", "out", "lse", "parts",
            "next")]
        + [(name, ctypes.c_int64) for name in (
            "q_token", "q_head", "q_rope_token", "q_rope_head", "keys_page", "keys_token", "keys_group", "rope_page",
            "rope_token", "values_page", "values_token", "values_group", "table_row", "mask_sequence", "mask_query",
            "out_token", "out_head", "lse_token")]
        + [(name, ctypes.c_int32) for name in (
            "B", "H", "G", "d_k", "d_r", "d_v", "page", "queries", "block", "blocks", "pieces", "half")]
        + [("scale", ctypes.c_float)]
    )  # fmt: skip


def attend(
    q: Tensor, q_rope: Tensor | None, keys: Tensor, k_rope: Tensor | None, values: Tensor, batch: Batch, scale: float,
    out: Tensor, lse: Tensor | None = None, mask: Tensor | None = None,
) -> None:  # fmt: skip
    """q [N, H, d_k] and q_rope [N, H, d_r] to pages of keys [P, page, G, d_k], k_rope [P, page, d_r] and values
    [P, page, G, d_v], into `out` [N, H, d_v] and `lse` [N, H]. Where values are the keys they are one tensor.

    mask  [B, S, T] bool, for S queries of every sequence: what it hides is not read either
    """
    H, d_k = q.shape[1:]
    page, G, d_v = values.shape[1:]
    table, lengths, starts, queries = batch
    B, block = lengths.shape[0], max(1, min(queries, ROWS // (H // G)))
    blocks = -(-queries // block)
    longest, room = int(lengths.max()) if B else 0, table.shape[1] * page
    if longest > room:
        raise ValueError(f"seq_lens: a sequence of {longest} tokens, block_table has pages for {room}")
    pieces = max(1, -(-longest // PIECE))
    units, rows = B * blocks * pieces, G * (-(-block * (H // G) // 4) * 4)
    parts = torch.empty(units, rows, -(-d_v // LANES) * LANES + 2, dtype=torch.float32)
    counter = ctypes.c_int64(0)
    seen = mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()
    pointed = (q, q_rope, keys, k_rope, values, table, lengths, starts, seen, out, lse, parts)
    arguments = Arguments(
        *(None if x is None else x.data_ptr() for x in pointed),
        ctypes.addressof(counter),
        *q.stride()[:2],
        *((0, 0) if q_rope is None else q_rope.stride()[:2]),
        *keys.stride()[:3],
        *((0, 0) if k_rope is None else k_rope.stride()[:2]),
        *values.stride()[:3],
        table.stride(0),
        *((0, 0) if seen is None else seen.stride()[:2]),
        *out.stride()[:2],
        0 if lse is None else lse.stride(0),
        *(B, H, G, d_k, 0 if k_rope is None else k_rope.shape[2], d_v, page, queries, block, blocks, pieces),
        q.dtype == torch.bfloat16,
        scale * LOG2_E,
    )
    _run(arguments, units)
    compile.library().merge(ctypes.byref(arguments))


def _run(arguments: Arguments, units: int) -> None:
    """On as many threads as torch has; ctypes leaves Python to others meanwhile."""
    run, threads = compile.library().run, torch.get_num_threads()
    helpers = range(min(threads, units) - 1)
    others = [_pool(os.getpid(), threads).submit(run, ctypes.byref(arguments)) for _ in helpers]
    try:
        failed = run(ctypes.byref(arguments))
    finally:
        wait(others)  # which write where the caller's memory is
    if failed or any(other.result() for other in others):
        raise MemoryError("gva.ops: no memory for the decode kernel of impl='cpu'")


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Of this process: a fork has none of the threads of its parent."""
    return ThreadPoolExecutor(threads, thread_name_prefix="gva")
