"""AdamW, its schedule, and its state under names that survive resharding."""

import math

import torch
from torch import Tensor, nn

from gva.train.recipe import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Matrices decay, gains do not, and the maps M_h have a rate of their own, at which they decay no faster than the
    others. The state exists from the start, so that a checkpoint can be read into it."""
    parameters = list(model.parameters())
    maps = [p for name, p in model.named_parameters() if "key_map." in name or "back_map." in name]
    others = [p for p in parameters if not any(p is one for one in maps)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": recipe.weight_decay, "rate": 1.0},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "rate": 1.0},
        {"params": maps, "weight_decay": recipe.weight_decay / recipe.map_lr, "rate": recipe.map_lr},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter) for name in MOMENTS},
        }
    return optimizer


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of a step, counted from 0: linear warm-up, then a cosine down to min_lr."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (recipe.min_lr + (1 - recipe.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate"]


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments in one flat dict of tensors (DTensors where sharded), each weight once."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        if parameter not in optimizer.state:
            raise KeyError(f"{name}: not a parameter of the optimizer; are sharded weights gathered at the moment?")
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{key}.{name}"] = value
    return state
