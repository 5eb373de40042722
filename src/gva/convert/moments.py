"""What a conversion learns from text, in second moments of each layer: what its attention reads, how much the loss
depends on each token that is read, and on which directions of keys and values.

Queries, keys and values are linear in what is read, so its moments are theirs too. They are summed in float64, batch by
batch: memory does not grow with the text.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from tqdm import tqdm

from gva.attention import Attention
from gva.attention.rope import Rotation
from gva.diagnostics import attention_weights, observe
from gva.evaluate.scoring import model_losses
from gva.run.atomic import write_atomically

EVEN = 0.2  # the share of every token, in units of the mean, beside what the loss says of it


@dataclass
class Moments:
    """Sums over tokens, of all layers. x is what attention reads with a 1 behind it, g the gradient of the summed loss
    for the keys, before they rotate, and values of a token.

    reads      x x^T            [L, D + 1, D + 1]
    weighed    |g_v|^2 x x^T    [L, D + 1, D + 1]  g_v: the part of g for values; tokens that are attended to count
    slopes     g g^T            [L, 2 G d, 2 G d]
    sequences  how many are summed so far  [1]
    """

    reads: Tensor
    weighed: Tensor
    slopes: Tensor
    sequences: Tensor

    @classmethod
    def none(cls, config: Any) -> "Moments":
        layers, width = config.num_hidden_layers, config.hidden_size + 1
        both = 2 * config.num_value_groups * config.value_head_dim
        shapes = [(layers, width, width)] * 2 + [(layers, both, both), (1,)]
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @classmethod
    def load(cls, path: Path) -> "Moments":
        return cls(**load(path.read_bytes()))

    def save(self, path: Path) -> None:
        write_atomically(path, save({field.name: getattr(self, field.name) for field in fields(self)}))

    def of(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one layer, means over tokens: x x^T; the same with tokens weighed; g g^T."""
        tokens = self.reads[layer, -1, -1]
        reads, weighed = self.reads[layer] / tokens, self.weighed[layer] / self.weighed[layer, -1, -1]
        return reads, (weighed + EVEN * reads) / (1 + EVEN), self.slopes[layer] / tokens


def gather(model: Any, sequences: Tensor, path: Path, batch: int = 2, every: int = 16) -> Moments:
    """The moments over sequences [N, T] of tokens, each of which foretells the next. They are kept in `path` after so
    many batches, and what is summed there is not read again."""
    losses = model_losses(model)
    found = Moments.load(path) if path.is_file() else Moments.none(model.config)
    done = int(found.sequences)
    quiet = not sys.stderr.isatty()
    with tqdm(total=len(sequences), initial=done, desc="calibrating", unit="seq", disable=quiet) as bar:
        while done < len(sequences):
            part = sequences[done : done + batch].to(model.device)
            with _adding(model, found), torch.enable_grad():
                losses(part[:, :-1], part[:, 1:]).sum().backward()
            done += len(part)
            found.sequences.fill_(done)
            if done == len(sequences) or done // batch % every == 0:
                found.save(path)
            bar.update(len(part))
    return found


@contextmanager
def _adding(model: Any, sums: Moments) -> Iterator[None]:
    """Around one forward and backward pass, whose moments are added to `sums` at its end."""
    held: list[tuple[Any, ...]] = []

    def hold(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # the first layer's: no weight of the model asks for gradients
            output.requires_grad_()
        output.retain_grad()
        held.append((inputs[0].detach(), output))

    with ExitStack() as stack:
        for layer in model.base_model.layers:
            for name in ("k_proj", "v_proj"):
                stack.enter_context(_removed(getattr(layer.self_attn, name).register_forward_hook(hold)))
        yield
    for index, ((x, keys), (_, values)) in enumerate(zip(held[::2], held[1::2], strict=True)):
        x, g_k, g_v = (t.flatten(0, 1).double() for t in (x, keys.grad, values.grad))
        x, g = torch.cat((x, torch.ones_like(x[:, :1])), 1), torch.cat((g_k, g_v), 1)
        sums.reads[index] += (x.T @ x).cpu()
        sums.weighed[index] += ((x * g_v.square().sum(1, keepdim=True)).T @ x).cpu()
        sums.slopes[index] += (g.T @ g).cpu()


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def distances(model: Any, sequences: Tensor) -> Tensor:
    """How much of its attention each layer gives to each distance, [L, T], over sequences [N, T]."""

    def look(module: Attention, hidden: Tensor, rotation: Rotation) -> Tensor:
        weights = attention_weights(module, hidden, rotation).sum((0, 1)).double().cpu()
        length = len(weights)
        back = torch.arange(length)[:, None] - torch.arange(length)
        return torch.zeros(length).double().scatter_add_(0, back.clamp(min=0).flatten(), weights.flatten())

    total = torch.zeros(())
    for one in sequences[:, None].to(model.device):
        total = total + torch.stack(observe(model, partial(model, one, use_cache=False), look))
    return total / total.sum(1, keepdim=True)
