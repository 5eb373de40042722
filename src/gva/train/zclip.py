"""ZClip (arXiv 2504.02507): clip a gradient norm that is an outlier among its recent past.

Running mean and variance of the norm; a norm whose z-score exceeds the threshold is brought down to
mean + threshold^2 / z * deviation, the further the more extreme it was, and enters the statistics as clipped.
Everything stays on the device: no step waits for a number to reach the host.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class ZClip:
    alpha, threshold, warmup, eps = 0.97, 2.5, 25, 1e-6

    def __init__(self, device: torch.device) -> None:
        # During the warm-up: the number of norms, their mean, and the sum of squared deviations (Welford).
        self.state = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("count", "mean", "var")}

    @torch.no_grad()
    def __call__(self, norm: Tensor) -> Tensor:
        """The norm to clip to, for a gradient of this norm; also takes the norm into the statistics."""
        norm = norm.double()
        count, mean, var = self.state["count"], self.state["mean"], self.state["var"]
        warming = count < self.warmup
        deviation = var.sqrt()
        z = (norm - mean) / (deviation + self.eps)
        outlier = (z > self.threshold) & ~warming
        target = torch.where(outlier, mean + self.threshold**2 / z * deviation, norm)

        welford_mean = mean + (norm - mean) / (count + 1)
        squares = var + (norm - mean) * (norm - welford_mean)
        last = count + 1 >= self.warmup  # the sum of squares becomes a variance
        ema_mean = self.alpha * mean + (1 - self.alpha) * target
        ema_var = self.alpha * var + (1 - self.alpha) * (target - ema_mean) ** 2
        var.copy_(torch.where(warming, torch.where(last, squares / (count + 1), squares), ema_var))
        mean.copy_(torch.where(warming, welford_mean, ema_mean))
        count.add_(1)
        return target


@torch.no_grad()
def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm over all of them and, where they are sharded, over all ranks; finite only if every number is."""
    norm = torch.nn.utils.get_total_norm(list(tensors))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def scale_gradients(gradients: list[Tensor], norm: Tensor, target: Tensor) -> None:
    """Bring gradients of this norm down to the target; exactly nothing happens where they are equal."""
    torch._foreach_mul_(gradients, (target / norm.double()).clamp(max=1.0).to(norm.dtype))
