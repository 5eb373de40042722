"""What a checkpoint with grouped-query attention can become. A target says which sizes a cache allows, what the config
is, and makes one layer's weights at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gva.convert.latent import Latent, joint_latent, own_values
from gva.convert.layer import Keys, Layer, cut_rotation
from gva.errors import check


class Split(NamedTuple):
    """Of a layer's cached scalars: those that rotate and those that do not."""

    slice: int
    state: int


class Lost(NamedTuple):
    """What a layer loses of its rotation, and of what it rotates no longer: each comparable between layers alone."""

    cut: float
    content: float


class Converted(NamedTuple):
    """The matrices of one layer's attention by name, a bias being the last column (maps have none), and what of the
    config is this layer's own."""

    made: dict[str, Tensor]
    fields: dict[str, Any]
    lost: Lost


@dataclass(frozen=True)
class Target:
    """
    splits   the ways to spend a cache of this many scalars on a source's config; ValueError where there is none
    fields   of the whole model's config, at a split
    layer    converts one layer, given how it attends to distances
    """

    splits: Callable[[Any, int], list[Split]]
    fields: Callable[[Any, Split], dict[str, Any]]
    layer: Callable[[Layer, Split, Tensor], Converted]


# ---- a slice, and one latent for all keys and values ----


def _free(source: Any, cache: int) -> list[Split]:
    """Every split in steps that kernels like."""
    G, d = source.num_value_groups, source.value_head_dim
    step = 16 if d >= 64 else 4
    check(cache % step == 0, "cache", cache, f"must be a multiple of {step}")
    widths = range(step, min(cache - step, G * d - step) + 1, step)
    found = [Split(width, cache - width) for width in widths if cache <= 2 * G * d]
    check(bool(found), "cache", cache, f"must lie between {2 * step} and {2 * G * d}, what the source caches")
    return found


def _one_group_fields(source: Any, split: Split) -> dict[str, Any]:
    one = {"attention": "gva", "num_value_groups": 1, "map_init": "none", "rope_allocation": "additive"}
    return {**one, "value_head_dim": split.state, "rope_dim": split.slice, "output_bias": True}


def _one_group(layer: Layer, split: Split, distances: Tensor) -> Converted:
    """What a head makes of the state goes into its query and into the output projection."""
    rotated, turns, content, cut = cut_rotation(layer, split.slice, distances)
    latent = joint_latent(layer, content, split.state)
    asked = latent.keys.T @ content.ask  # [H, state, d]
    o = torch.einsum("xhd,hdw->xhw", layer.o, per_head(latent.values, layer.group))
    made = _projections(layer, torch.cat((asked, rotated.ask), dim=1), rotated)
    made |= {"v_proj": _unbiased(latent.made), "o_proj": _biased(o.flatten(1), latent_bias(layer, latent))}
    fields = {"rope_frequencies": turns.tolist(), "value_head_dim": split.state, "rope_dim": split.slice}
    return Converted(made, fields, Lost(cut, latent.lost))


def _latent_fields(source: Any, split: Split) -> dict[str, Any]:
    own = {"attention": "mla", "latent_norm": False, "rope_allocation": "additive", "output_bias": True}
    return {**own, "latent_dim": split.state, "rope_dim": split.slice}


def _latent(layer: Layer, split: Split, distances: Tensor) -> Converted:
    """The same function; what a head makes of the state are maps of its own."""
    rotated, turns, content, cut = cut_rotation(layer, split.slice, distances)
    latent, H, d = joint_latent(layer, content, split.state), *layer.q.shape[:2]
    whole = torch.eye(d, dtype=torch.float64).expand(H, d, d)
    made = _projections(layer, torch.cat((whole, rotated.ask), dim=1), rotated)
    made["latent_proj"] = _unbiased(latent.made)
    made["k_up_proj"] = (content.ask.transpose(1, 2) @ latent.keys).flatten(0, 1)
    made["v_up_proj"] = per_head(latent.values, layer.group).flatten(0, 1)
    made["o_proj"] = _biased(layer.o.flatten(1), latent_bias(layer, latent))
    fields = {"rope_frequencies": turns.tolist(), "latent_dim": split.state, "rope_dim": split.slice}
    return Converted(made, fields, Lost(cut, latent.lost))


# ---- a slice, and the values of the source's groups as they are ----


def _what_values_leave(source: Any, cache: int) -> list[Split]:
    values = source.num_value_groups * source.value_head_dim
    check(
        values < cache <= 2 * values and (cache - values) % 2 == 0,
        "cache",
        cache,
        f"must be even, from {values + 2} on, {values} being the values, and at most {2 * values}",
    )
    return [Split(cache - values, values)]


def _own_groups_fields(source: Any, split: Split) -> dict[str, Any]:
    return {"attention": "gva", "map_init": "none", "rope_allocation": "additive", "rope_dim": split.slice}


def _own_groups(layer: Layer, split: Split, distances: Tensor) -> Converted:
    """Content keys are guessed from the values of the own group; the guess goes into the query."""
    rotated, turns, content, cut = cut_rotation(layer, split.slice, distances)
    maps, lost = own_values(layer, content)
    asked = per_head(maps, layer.group).transpose(1, 2) @ content.ask
    made = _projections(layer, torch.cat((asked, rotated.ask), dim=1), rotated)
    made |= {"v_proj": layer.v.flatten(0, 1), "o_proj": _biased(layer.o.flatten(1), layer.o_bias)}
    return Converted(made, {"rope_frequencies": turns.tolist(), "rope_dim": split.slice}, Lost(cut, lost))


# ---- fewer groups ----


def _whole_groups(source: Any, cache: int) -> list[Split]:
    H, G, d = source.num_attention_heads, source.num_value_groups, source.value_head_dim
    fewer = [n for n in range(1, G) if G % n == 0 and H % n == 0]
    allowed = [2 * n * d for n in fewer]
    check(cache in allowed, "cache", cache, f"must be one of {allowed}: keys and values of whole groups")
    return [Split(cache // 2, cache // 2)]


def _fewer_groups_fields(source: Any, split: Split) -> dict[str, Any]:
    return {"num_value_groups": split.state // source.value_head_dim}


def _fewer_groups(layer: Layer, split: Split, distances: Tensor) -> Converted:
    groups = split.state // layer.k.shape[1]
    mean = {"k_proj": layer.k, "v_proj": layer.v}
    made = {name: heads.unflatten(0, (groups, -1)).mean(1).flatten(0, 1) for name, heads in mean.items()}
    made |= {"q_proj": layer.q.flatten(0, 1), "o_proj": _biased(layer.o.flatten(1), layer.o_bias)}
    return Converted(made, {}, Lost(0.0, 0.0))


MAKERS = {
    "gva": Target(_free, _one_group_fields, _one_group),
    "mla": Target(_free, _latent_fields, _latent),
    "gva-own-groups": Target(_what_values_leave, _own_groups_fields, _own_groups),
    "gqa": Target(_whole_groups, _fewer_groups_fields, _fewer_groups),
}


# ---- parts ----


def per_head(of_groups: Tensor, group: int) -> Tensor:
    return of_groups.repeat_interleave(group, dim=0)


def latent_bias(layer: Layer, latent: Latent) -> Tensor:
    """Of the output: attention weights have the sum 1, so the mean of values comes through whole."""
    return layer.o_bias + torch.einsum("xhd,hd->x", layer.o, per_head(latent.values_mean, layer.group))


def _projections(layer: Layer, ask: Tensor, rotated: Keys) -> dict[str, Tensor]:
    """Queries ask[h] q_h, and the keys that rotate."""
    return {"q_proj": (ask @ layer.q).flatten(0, 1), "k_rope_proj": rotated.of}


def _biased(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat((weight, bias[:, None]), dim=1)


def _unbiased(weight: Tensor) -> Tensor:
    return _biased(weight, torch.zeros(len(weight), dtype=weight.dtype))
