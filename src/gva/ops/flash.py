"""FlashAttention-3, through the shared object that vLLM ships (`_vllm_fa3_C.abi3.so`): what GQA decodes with, and the
peer of the benchmarks. Load it once; nothing here is used before."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .library import _library

if TYPE_CHECKING:
    from .dense import Spans

_loaded = False
_library.define(
    "flash_decode(Tensor q, Tensor k, Tensor v, Tensor seq_lens, Tensor block_table, Tensor cu_seqlens_q,"
    " Tensor scheduler, int S, int max_len, float scale, Tensor(a!) out) -> ()"
)


def installed() -> str | None:
    """The shared object of an installed vLLM, if there is one."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")]
    return str(found[0]) if found else None


def load(path: str | None = None) -> bool:
    """Registers torch.ops._vllm_fa3_C, from this file or from an installed vLLM; False where there is neither."""
    global _loaded
    path = path or installed()
    if path is None:
        return False
    torch.ops.load_library(path)
    _loaded = True
    return True


def available(device: torch.device) -> bool:
    """Whether it was loaded and the device is one it runs on (Hopper)."""
    return _loaded and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def metadata(
    seq_lens: torch.Tensor, *, S: int, max_len: int, H: int, G: int, d_h: int, dtype: torch.dtype,
    page: int | None, cu_seqlens_q: torch.Tensor | None, splits: int = 0,
) -> torch.Tensor:  # fmt: skip
    """The scheduler metadata that FA3 would otherwise compute in every call."""
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(
        len(seq_lens), S, max_len, H, G, d_h, d_h, dtype, seq_lens, cu_seqlens_q, None, None, None, None, page, 0,
        S > 1, -1, -1, False, splits, None, 0)  # fmt: skip


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor, *, S: int, max_len: int, scale: float,
    block_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
    scheduler: torch.Tensor | None = None, splits: int = 0, descale: tuple | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Paged: q [N, H, d_h], k and v [P, page, G, d_h]. Contiguous: q [B, S, H, d_h], k and v [B, T, G, d_h]."""
    descales = descale or (None, None, None)
    paged = block_table is not None
    return torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, out, cu_seqlens_q, None, None, None, seq_lens,
        S if paged else None, max_len if paged else None, block_table, None, None, None, None, None, *descales, scale,
        S > 1, -1, -1, 0.0, True, scheduler, splits, None, 0, None, 1, 0, None)[0]  # fmt: skip


@dataclass
class FlashPlan:
    """What FlashAttention-3 wants to know of a decode step, once for all layers."""

    cu_seqlens_q: torch.Tensor
    scheduler: torch.Tensor
    S: int
    max_len: int


def plan_decode(
    seq_lens: torch.Tensor, *, S: int, max_len: int, H: int, G: int, d_h: int, dtype: torch.dtype, page: int
) -> FlashPlan:
    """For S new tokens in each of the sequences; max_len bounds their lengths."""
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device) * S
    scheduler = metadata(seq_lens, S=S, max_len=max_len, H=H, G=G, d_h=d_h, dtype=dtype, page=page, cu_seqlens_q=starts)
    return FlashPlan(starts, scheduler, S, max_len)


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
    plan: FlashPlan, scale: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """q [N, H, d_h] against pages k and v [P, page, G, d_h], into `out` [N, H, d_h]: an op of ours, so that
    torch.compile sees one node."""
    torch.ops.gva.flash_decode(
        q, k, v, seq_lens, block_table, plan.cu_seqlens_q, plan.scheduler, plan.S, plan.max_len, scale, out
    )


def _decode(q, k, v, seq_lens, block_table, cu_seqlens_q, scheduler, S, max_len, scale, out):
    attend(
        q, k, v, seq_lens, S=S, max_len=max_len, scale=scale, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
        scheduler=scheduler, out=out)  # fmt: skip


_library.impl("flash_decode", _decode, "CompositeExplicitAutograd")
torch.library.register_fake("gva::flash_decode", lambda *args: None, lib=_library)


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Spans, keys: Spans, scale: float, causal: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention without a cache, as `gva.ops.dense` asks for it."""
    attended, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, out, queries.on_device, keys.on_device, None, None, None, queries.longest,
        keys.longest, None, None, None, None, None, None, None, None, None, scale, causal, -1, -1, 0.0, True, None, 1,
        None, 0, None, 1, 0, None)  # fmt: skip
    return attended, lse
