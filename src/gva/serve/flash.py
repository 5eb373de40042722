"""FlashAttention as vLLM ships it, for `gva.ops.dense`."""

import functools
from typing import Any

import torch
from torch import Tensor

from gva.ops.dense import Spans


def varlen(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, causal: bool, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    attend, version = _found()
    return attend(
        q=q,
        k=k,
        v=v,
        max_seqlen_q=queries.longest,
        cu_seqlens_q=queries.on_device,
        max_seqlen_k=keys.longest,
        cu_seqlens_k=keys.on_device,
        softmax_scale=scale,
        causal=causal,
        fa_version=version,
        return_softmax_lse=True,
        out=out,
    )


@functools.cache
def _found() -> tuple[Any, int]:
    """The function, and the version to ask it for: vLLM finds that out anew at every call."""
    from vllm.v1.attention.backends import fa_utils

    return fa_utils.flash_attn_varlen_func, fa_utils.get_flash_attn_version()


def takes(dtype: torch.dtype, width: int) -> bool:
    """Whether it takes queries of this kind."""
    return dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256
