"""Next-token loss and the divergence from a teacher in one function: of either model's logits, a stretch is held at a
time, and the gradient is made with the value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backend import select
from .loss import BLOCK, WARPS

# Of each model at a time: 512 MiB in bfloat16, and plain torch, which has about eight of them, 64 MiB in float32.
LOGITS = {True: 2**28, False: 2**24}


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    kl_weight: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The objective, and [cross entropy, KL] that it is made of, in nats, summed over labels [N] that count.

    The student's logits are hidden [N, D] @ weight[V, D]^T, the teacher's the same of its own width. KL is that of the
    student's distribution from the teacher's, sum p (log p - log q), both softened by the temperature;
    objective = cross entropy + kl_weight * temperature^2 * KL, the square keeping its gradient as large at any
    temperature. Only the objective has a gradient, in `hidden` and `weight`. Logits are rounded to the dtype of
    `hidden`, everything after them is float32, or float64 for such. `chunk`: tokens at a time. `impl` as in
    `paged_attention`; 'triton' keeps the logits' gradient where the logits were.
    """
    kernel = select(impl, hidden.device, hidden.dtype, hidden.dtype) != "reference"
    return _LinearDistillation.apply(
        hidden, weight, labels, teacher_hidden, teacher_weight, float(kl_weight), float(temperature), ignore_index,
        chunk or max(1, LOGITS[kernel] // weight.shape[0]), _in_place if kernel else _losses,
    )  # fmt: skip


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        kl_weight: float,
        temperature: float,
        ignore_index: int,
        chunk: int,
        losses: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        narrow, teacher_weight = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=wide)
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            student, teacher = hidden[part] @ narrow.T, teacher_hidden[part] @ teacher_weight.T
            found, gradient = losses(student, teacher, labels[part], kl_weight, temperature, ignore_index)
            sums += found
            d_hidden[part] = gradient @ narrow
            d_weight += gradient.T @ hidden[part]
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        ctx.mark_non_differentiable(sums)
        return sums[0] + kl_weight * temperature**2 * sums[1], sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0], d_weight * grads[0], *[None] * 8


def _losses(
    student: Tensor, teacher: Tensor, labels: Tensor, kl_weight: float, temperature: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """[cross entropy, KL] of logits [n, V], and the gradient of the objective in the student's."""
    dtype = student.dtype
    student, teacher = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (student, teacher))
    counts = (labels != ignore_index)[:, None]
    target = labels[:, None].where(counts, 0)
    plain = student.log_softmax(-1)
    log_q, log_p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    each = torch.cat([-plain.gather(1, target), (p * (log_p - log_q)).sum(-1, keepdim=True)], 1)
    gradient = plain.exp().scatter_add_(1, target, torch.full_like(each[:, :1], -1.0))
    gradient += kl_weight * temperature * (q - p)
    return each.where(counts, 0).sum(0), gradient.where(counts, 0).to(dtype)


def _in_place(
    student: Tensor, teacher: Tensor, labels: Tensor, kl_weight: float, temperature: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The same; the gradient takes the place of the student's logits."""
    from .triton.loss import distillation_kernel

    N, V = student.shape
    losses = torch.empty(N, 2, dtype=torch.float32, device=student.device)
    distillation_kernel[(N,)](
        student, teacher, labels, losses, student.stride(0), teacher.stride(0), V, ignore_index, 1 / temperature,
        kl_weight * temperature, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses.sum(0), student
