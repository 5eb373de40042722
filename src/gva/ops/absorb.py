"""The absorbed form's queries."""

import torch
from torch import Tensor

from .backend import select


def absorb_tokens(q: Tensor, maps: Tensor, impl: str | None = None) -> Tensor:
    """q_h M_h^T of tokens one after another, contiguous [N, H, d_h]: queries for grouped values as they are cached.
    Without checks and outside torch.library, for callers that count microseconds.

    q     [N, H, >= d_n]   content first; any strides over N and H
    maps  [H, d_n, d_h]    M_h^T, contiguous
    """
    if select(impl, q.device, q.dtype, q.dtype) == "reference":
        return torch.bmm(q[..., : maps.shape[1]].transpose(0, 1), maps).transpose(0, 1).contiguous()
    from .triton import launch

    return launch.absorb(q, maps)
