"""How a conversion goes.

    1  calibrate   moments of what attention reads, and of the gradient of the loss (moments.py)
    2  search      how to split the cache between slice and state, by the loss on calibration text
    3  convert     layer by layer, in float64 (targets.py)

What 1 and 2 have found is kept in a folder, so that a stopped conversion goes on.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gva.config import GvaConfig, own_fields
from gva.convert.layer import read_layer
from gva.convert.moments import distances, gather
from gva.convert.targets import MAKERS, Converted, Split
from gva.evaluate.scoring import model_losses
from gva.model import GvaForCausalLM
from gva.run.atomic import write_atomically
from gva.run.files import read_object

EVALUATIONS = 12  # of the whole model, at most, in a search
START = 0.27  # the share of a cache that rotates, where a search begins
LOOKED_AT = 8  # sequences whose attention is looked at, for distances
MOMENTS, FOUND = "moments.safetensors", "losses.json"


@dataclass(frozen=True)
class Request:
    """What is to become of a source. Sequences are [N, T] tokens; the search takes the last `searched` to calibrate."""

    target: str
    cache: int
    calibration: Tensor
    searched: int
    slice: int | None = None  # instead of a search


@dataclass
class Conversion:
    """A conversion under way, whose findings lie in `folder`."""

    source: GvaForCausalLM
    request: Request
    folder: Path
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.target = MAKERS[self.request.target]
        self.splits = self.target.splits(self.source.config, self.request.cache)
        self.layers = range(self.source.config.num_hidden_layers)
        path = self.folder / FOUND
        self.losses: dict[str, float] = read_object(path, "remove it") if path.is_file() else {}

    def calibrate(self) -> None:
        self.moments = gather(self.source, self.request.calibration, self.folder / MOMENTS)
        self.distances = distances(self.source, self.request.calibration[:LOOKED_AT])

    def convert(self, splits: list[Split]) -> GvaForCausalLM:
        """The whole model, each layer at its split."""
        layers = [self.layer(index, split) for index, split in enumerate(splits)]
        usual = max(set(splits), key=splits.count)
        fields = self.target.fields(self.source.config, usual)
        return _assembled(self.source, fields, layers)

    def only_cut(self, splits: list[Split]) -> GvaForCausalLM | None:
        """What the slices alone cost: the same, its state holding all else. None where there is no choice of them."""
        if len(self.splits) == 1:
            return None
        whole = self.source.config.row.scalars
        return self.convert([Split(split.slice, whole - split.slice) for split in splits])

    def layer(self, index: int, split: Split) -> Converted:
        read = read_layer(self.source, index, self.moments.of(index))
        return self.target.layer(read, split, self.distances[index])

    def search(self) -> list[Split]:
        """The split of each layer: of all alike the one with the lowest loss, from which layers then depart for what
        each loses, if that lowers it further."""
        if len(self.splits) == 1 or self.request.slice is not None:
            return self.alike(self._start())
        at = self._descend(self._start())
        apart = self._apart(at)
        return min(apart, self.alike(at), key=self.loss)

    def alike(self, number: int) -> list[Split]:
        return [self.splits[number]] * len(self.layers)

    def _start(self) -> int:
        """The split that was asked for, or one that is seldom far off."""
        asked, widths = self.request.slice, [split.slice for split in self.splits]
        wanted = START * self.request.cache if asked is None else asked
        return min(range(len(widths)), key=lambda number: abs(widths[number] - wanted))

    def _descend(self, at: int) -> int:
        """To a loss that is below those next to it."""
        while len(self.losses) + 2 < EVALUATIONS:
            near = [number for number in (at, at - 1, at + 1) if 0 <= number < len(self.splits)]
            best = min(near, key=lambda number: self.loss(self.alike(number)))
            if best == at:
                break
            at = best
        return at

    def _apart(self, at: int) -> list[Split]:
        """Each layer's own split. A score's variance is worth as much of the loss as makes the best split for all the
        best in the sum over layers too."""
        near = range(max(at - 2, 0), min(at + 3, len(self.splits)))
        lost = {n: [self.layer(index, self.splits[n]).lost for index in self.layers] for n in near}
        below, above = max(at - 1, near[0]), min(at + 1, near[-1])
        more = sum(one.content for one in lost[above]) - sum(one.content for one in lost[below])
        less = sum(one.cut for one in lost[below]) - sum(one.cut for one in lost[above])
        worth = more / less if less > 0 else 0.0
        return [
            self.splits[min(near, key=lambda n: worth * lost[n][index].cut + lost[n][index].content)]
            for index in self.layers
        ]

    def loss(self, splits: list[Split]) -> float:
        """On the calibration text that the search takes; what was found before is not run again."""
        name = " ".join(f"{split.slice}+{split.state}" for split in (splits[:1] if len(set(splits)) == 1 else splits))
        if name not in self.losses:
            found = mean_loss(self.convert(splits), self.request.calibration[-self.request.searched :])
            self.losses[name] = found
            write_atomically(self.folder / FOUND, json.dumps(self.losses, indent=2))
            told = name if len(name) < 20 else f"{len(set(splits))} splits over the layers"
            self.say(f"{told} (slice + state): loss {found:.4f}")
        return self.losses[name]


@torch.no_grad()
def mean_loss(model: Any, sequences: Tensor, batch: int = 4) -> float:
    """Nats per token over sequences [N, T]."""
    losses, total = model_losses(model), 0.0
    for part in sequences.split(batch):
        part = part.to(model.device)
        total += losses(part[:, :-1], part[:, 1:]).double().sum().item()
    return total / sequences[:, 1:].numel()


def _assembled(source: GvaForCausalLM, fields: dict[str, Any], layers: list[Converted]) -> GvaForCausalLM:
    """A model of converted layers, all else being the source's own tensors."""
    config = converted_config(source.config, fields, layers)
    with torch.device("meta"):
        model = GvaForCausalLM(config)
    state = {name: tensor for name, tensor in source.state_dict().items() if ".self_attn." not in name}
    wanted = model.state_dict()
    like = source.get_input_embeddings().weight
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}.self_attn"
        for name, matrix in layer.made.items():
            weight, bias = f"{prefix}.{name}.weight", f"{prefix}.{name}.bias"
            widths = wanted[weight].shape[1]
            state[weight] = matrix[:, :widths].to(like, copy=True)
            if bias in wanted:
                state[bias] = matrix[:, widths].to(like, copy=True)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def converted_config(source: GvaConfig, fields: dict[str, Any], layers: list[Converted]) -> GvaConfig:
    """The source's with another attention, at the source's scale of scores. What all layers have is said once."""
    size = {name: getattr(source, name) for name in own_fields() if name != "layers"}
    first = layers[0].fields
    alike = {name for name in first if all(layer.fields[name] == first[name] for layer in layers)}
    own = {
        str(index): {name: value for name, value in layer.fields.items() if name not in alike}
        for index, layer in enumerate(layers)
    }
    if "rope_frequencies" in first:  # which say all that these did
        plain = {"rope_type": "default", "rope_theta": source.rope_theta}
        size |= {"rope_frequencies": None, "rope_parameters": plain, "positional": None}
    size |= {**fields, **{name: first[name] for name in alike}, "score_scale": source.scaling}
    config = GvaConfig(**size, layers={index: held for index, held in own.items() if held} or None)
    config.dtype = source.dtype
    return config
