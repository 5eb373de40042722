"""Rotary positions: half-split convention; the default, linear, yarn and llama3 frequencies of transformers' configs,
or whichever a config names."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cos and sin, [..., 1, rotated_dim / 2], to broadcast over heads


def frequencies(
    config: Any, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """The angle per position of each rotated pair, [rotated_dim / 2], and the factor on cos and sin.

    They are derived anew rather than kept in a buffer: nothing then goes stale when a model is created
    on the meta device, cast, or moved.
    """
    if config.rope_frequencies is not None:
        return torch.tensor(config.rope_frequencies, device=device, dtype=dtype), 1.0
    parameters, dim = config.rope_parameters, config.rotated_dim
    base, kind = parameters["rope_theta"], parameters["rope_type"]
    exponents = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
    inverse = 1.0 / torch.pow(base, exponents)
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(config, inverse), 1.0
    return _yarn(config, inverse, dim)


def _llama3(config: Any, inverse: Tensor) -> Tensor:
    """Pairs whose turn fits often into the length of training keep their frequency, those that it hardly fits into are
    stretched by the whole factor, in between the share that is stretched falls linearly with the number of turns."""
    parameters = config.rope_parameters
    trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = trained * inverse / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * kept + inverse / parameters["factor"] * (1 - kept)


def _yarn(config: Any, inverse: Tensor, dim: int) -> tuple[Tensor, float]:
    """Pairs that turn often keep their frequency, pairs that turn rarely are stretched, a ramp in between."""
    parameters = config.rope_parameters
    base = parameters["rope_theta"]
    trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = parameters.get("factor") or config.max_position_embeddings / trained

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(parameters.get("beta_fast") or 32)
    high = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    pairs = torch.arange(dim // 2, device=inverse.device, dtype=inverse.dtype)
    stretched = ((pairs - low) / span).clamp(0, 1)
    mixed = inverse / factor * stretched + inverse * (1 - stretched)
    return mixed, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict, factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(factor, parameters["mscale"]) / magnitude(factor, parameters["mscale_all_dim"])
    return magnitude(factor)


def tables(config: Any, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """cos and sin [..., 1, rotated_dim / 2] for positions [...].

    They stay in float32 (float64 for a float64 model): a bfloat16 table would blur the angle itself.
    """
    (rotation,) = Turns([config], positions.device, dtype).tables(positions)
    return rotation


class Turns:
    """How the layers of a model turn, their frequencies being on a device: one set for all layers that turn alike."""

    def __init__(self, configs: Sequence[Any], device: torch.device | None, dtype: torch.dtype) -> None:
        sets: dict[Any, int] = {}
        self.of_layer = [sets.setdefault(_turning(config), len(sets)) for config in configs]
        self.dtype = torch.promote_types(dtype, torch.float32)
        firsts = [self.of_layer.index(number) for number in range(len(sets))]
        self.sets = [frequencies(configs[first], device, self.dtype) for first in firsts]

    def tables(self, positions: Tensor) -> list[Rotation]:
        """The rotation of each layer at positions [...], tables being shared as the frequencies are."""
        at = positions[..., None, None].to(self.dtype)
        angles = [(at * inverse, factor) for inverse, factor in self.sets]
        made = [(angle.cos() * factor, angle.sin() * factor) for angle, factor in angles]
        return [made[number] for number in self.of_layer]


def _turning(config: Any) -> Any:
    """What the frequencies of a config depend on."""
    if config.rope_frequencies is not None:
        return tuple(config.rope_frequencies)
    return config.rotated_dim, config.max_position_embeddings, repr(sorted(config.rope_parameters.items()))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn x [..., heads, rotated_dim], pairing dimension i with i + rotated_dim / 2."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
