"""Parallelism, applied from outside: the model reads as if for one device.

Order: activation checkpointing, compile, then FSDP2 or DDP. One process is a group of one, so that the loop
has no second path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gva.data.batches import IGNORED
from gva.model import GvaForCausalLM
from gva.ops import linear_cross_entropy, linear_distillation
from gva.run.ranks import Ranks
from gva.train.recipe import Recipe


@dataclass(frozen=True)
class Lesson:
    """What a frozen model teaches. Not a module: it is whole on every rank, and no part of what is trained or kept."""

    teacher: "SummedLoss"
    kl_weight: float
    temperature: float


class SummedLoss(nn.Module):
    """The model and its loss as one module, so that they synchronise as one."""

    def __init__(self, model: GvaForCausalLM, lesson: Lesson | None = None) -> None:
        super().__init__()
        self.model, self.lesson = model, lesson

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
        hits: bool = False,
    ) -> Tensor:
        """The cross entropy in nats, summed over all targets that count, or each target's own [B, T], or with `hits`
        whether each is the likeliest. A mask [B, 1, T, T] is true where a slot sees another; without one, causal.
        With a teacher the sum is [objective, cross entropy, KL], as `linear_distillation` has them."""
        hidden = self.hidden(input_ids, position_ids, attention_mask)
        if hits:
            return self.model.lm_head(hidden).argmax(-1) == labels
        if per_token:
            logits = self.model.lm_head(hidden).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
            return loss.view_as(labels)
        weight = self.model.lm_head.weight
        if self.lesson is None:
            return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), IGNORED)
        teacher = self.lesson.teacher
        with torch.no_grad():
            taught = teacher.hidden(input_ids, position_ids, attention_mask)
        objective, parts = linear_distillation(
            hidden.flatten(0, 1), weight, labels.flatten(), taught.flatten(0, 1), teacher.model.lm_head.weight,
            self.lesson.kl_weight, self.lesson.temperature, IGNORED,
        )  # fmt: skip
        return torch.cat([objective[None], parts])

    def hidden(self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """What the head reads, [B, T, hidden_size]."""
        embedded = self.model.get_input_embeddings()(input_ids)
        if torch.is_autocast_enabled(embedded.device.type):
            # The residual stream is in half precision too, as it is where weights are sharded in half precision.
            embedded = embedded.to(torch.get_autocast_dtype(embedded.device.type))
        return self.model.model(
            inputs_embeds=embedded, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )[0]


def parallelize(model: GvaForCausalLM, recipe: Recipe, ranks: Ranks, teacher: SummedLoss | None = None) -> nn.Module:
    """A SummedLoss around the model, spread over the ranks as the recipe says. A teacher that counts for nothing is not
    asked."""
    if recipe.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers, lesson = [*model.model.layers], None
    if teacher is not None and recipe.kl_weight:
        layers += teacher.model.model.layers
        lesson = Lesson(teacher, recipe.kl_weight, recipe.kl_temperature)
    loss = SummedLoss(model, lesson)
    if recipe.compile:  # one layer, which serves for all of them: seconds, not minutes
        for layer in layers:
            layer.compile()
    if ranks.world > 1 and recipe.parallel == "fsdp":
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: Any = {"mesh": mesh, **({"mp_policy": policy} if recipe.precision == "bf16" else {})}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(loss, **options)
        return loss
    if ranks.world > 1:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(loss, device_ids=devices, gradient_as_bucket_view=True)
    return loss


@contextmanager
def accumulating(module: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged with the last of several micro-batches only."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    yield


def arithmetic(recipe: Recipe, device: torch.device) -> torch.autocast:
    """The precision of the recipe. Torch chooses the attention kernel; on Hopper it takes cuDNN's."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16")
