"""The head of a language model and its loss in one function: logits are held once, not three times."""

from typing import Any

import torch
from torch import Tensor

from .backend import select

BLOCK, WARPS = 8192, 16


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, impl: str | None = None
) -> Tensor:
    """Cross entropy in nats of hidden [N, D] @ weight[V, D]^T against labels [N], summed over labels that count.

    Logits are rounded to the dtype of `hidden`, everything after them is float32, as with autocast.
    `impl` as in `paged_attention`: 'reference' lets autograd keep what it wants; 'triton' keeps the logits' gradient
    where the logits were.
    """
    if select(impl, hidden.device, hidden.dtype, hidden.dtype) != "reference":
        return _LinearCrossEntropy.apply(hidden, weight, labels, ignore_index)
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype))
    logits = logits.to(torch.promote_types(hidden.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        from .triton.loss import cross_entropy_kernel

        narrow = weight.to(hidden.dtype)
        logits = hidden @ narrow.T
        N, V = logits.shape
        losses = torch.empty(N, dtype=torch.float32, device=hidden.device)
        if N:
            cross_entropy_kernel[(N,)](
                logits, labels, losses, logits.stride(0), V, ignore_index, BLOCK=BLOCK, num_warps=WARPS
            )
        ctx.save_for_backward(hidden, narrow, logits)
        ctx.weight_dtype = weight.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, narrow, gradient = ctx.saved_tensors
        # The loss is one number, so its gradient is a factor, applied to what is small.
        d_hidden = (gradient @ narrow).mul_(grads[0])
        d_weight = (gradient.T @ hidden).to(ctx.weight_dtype).mul_(grads[0])
        return d_hidden, d_weight, None, None
