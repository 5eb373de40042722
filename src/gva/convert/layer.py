"""One layer of grouped-query attention in float64, and what of its keys can do without rotation.

A pair of dimensions that RoPE turns is one complex number, i and i + d / 2 its two parts. At each frequency the keys of
all groups are mixed, which commutes with the rotation, so that few of the mixed ones carry most of the score. The pairs
that need it go on rotating, in a slice that all heads share. Of the others, a constant stands for the rotation: its
mean over the distances at which the layer looks back. They are content.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gva.attention.rope import frequencies


@dataclass(frozen=True)
class Layer:
    """Projections are [heads, d, D + 1]: they read [x, 1], and a bias is their last column.

    turns, factor   the angle per position of each pair [d / 2], and what RoPE multiplies cos and sin by
    reads, weighed, slopes   of `Moments`
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor  # [D, H, d]
    o_bias: Tensor  # [D]
    turns: Tensor
    factor: float
    scaling: float  # of scores
    reads: Tensor
    weighed: Tensor
    slopes: Tensor

    @property
    def group(self) -> int:
        """R, the heads that read one group."""
        return self.q.shape[0] // self.k.shape[0]


@dataclass(frozen=True)
class Keys:
    """Keys that all heads share: of [n, D + 1], the first halves of all pairs, then the second.

    back [G, d, n] is what they are of the source's keys, ask [H, n, d] what heads ask of them: (ask[h] q_h) . key.
    """

    of: Tensor
    back: Tensor
    heads: int  # R, those that read one group

    @property
    def ask(self) -> Tensor:
        return self.back.transpose(1, 2).repeat_interleave(self.heads, dim=0)


def read_layer(model: Any, index: int, moments: tuple[Tensor, Tensor, Tensor]) -> Layer:
    attention = model.base_model.layers[index].self_attn
    width = attention.config.value_head_dim
    turns, factor = frequencies(attention.config, dtype=torch.float64)

    def projection(linear: Any) -> Tensor:
        weight = linear.weight.detach().cpu().double()
        bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().cpu()
        return torch.cat((weight, bias.double()[:, None]), dim=1).unflatten(0, (-1, width))

    q, k, v = (projection(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
    o, o_bias = attention.o_proj.weight.detach().cpu().double(), attention.o_proj.bias
    o_bias = torch.zeros(len(o)).double() if o_bias is None else o_bias.detach().cpu().double()
    return Layer(q, k, v, o.unflatten(1, (-1, width)), o_bias, turns, factor, attention.scaling, *moments)


def cut_rotation(layer: Layer, width: int, distances: Tensor) -> tuple[Keys, Tensor, Keys, float]:
    """The slice of this width, its frequencies, the content, and the variance of scores that the constants cost, a
    mean over heads. `distances` [T]: how much of its attention the layer gives to each distance."""
    G, pairs = len(layer.k), len(layer.turns)
    mixed, mixing, strength = _mix(layer)
    turning = torch.exp(-1j * layer.turns[:, None] * torch.arange(len(distances), dtype=torch.float64))
    mean = (turning * distances).sum(1)  # [F], of unit numbers: what is left of it is what a constant gets right
    lost = strength * (1 - mean.abs().square())[:, None]
    chosen = lost.flatten().argsort(descending=True, stable=True)[: width // 2].sort().values
    rest = torch.ones(pairs * G, dtype=torch.bool)
    rest[chosen] = False
    content = rest.nonzero()[:, 0]
    rotated = _shared(layer, mixed, mixing * layer.factor**2, chosen)
    constant = _shared(layer, mixed, mixing * (mean * layer.factor**2)[:, None, None], content)
    return rotated, layer.turns[chosen // G], constant, float(lost.flatten()[content].sum())


def _mix(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed keys z [F, G, D + 1], complex, the strongest first, the mixing [F, G, G] that gives keys back,
    k_g = sum_j mixing[g, j] z_j, and their strength [F, G], which is that of the scores that they cause."""
    q, k, reads = _complex(layer.q).unflatten(0, (-1, layer.group)), _complex(layer.k), layer.reads + 0j
    energy = torch.einsum("grfd,de,grfe->fg", q, reads, q.conj()).real
    weight = energy.clamp(min=energy.max() * 1e-12).sqrt()
    met = weight[..., None] * torch.einsum("gfd,de,jfe->fgj", k, reads, k.conj()) * weight[:, None]
    values, vectors = (found.flip(-1) for found in torch.linalg.eigh(met))
    mixed = torch.einsum("fgj,fg,gfd->fjd", vectors.conj(), weight + 0j, k)
    mixing = vectors / weight[..., None]
    asked = torch.einsum("fgj,fg->fj", mixing.abs().square(), energy) / len(layer.q)
    return mixed, mixing, values.clamp(min=0) * asked * layer.scaling**2 / 2


def _shared(layer: Layer, mixed: Tensor, mixing: Tensor, chosen: Tensor) -> Keys:
    """Some of the mixed keys, by their numbers f G + j, in real numbers."""
    (G, d), n = layer.k.shape[:2], len(chosen)
    f, j, at = chosen // G, chosen % G, torch.arange(n)
    keys = mixed[f, j]
    factor = mixing[f, :, j]  # [n, G]
    back = torch.zeros(G, 2, d // 2, 2, n, dtype=torch.float64)  # the parts of a key, from the parts of z
    for part, other, value in ((0, 0, factor.real), (0, 1, -factor.imag), (1, 0, factor.imag), (1, 1, factor.real)):
        back[:, part, f, other, at] = value.T
    return Keys(torch.cat((keys.real, keys.imag)), back.view(G, d, 2 * n), layer.group)


def _complex(projection: Tensor) -> Tensor:
    return torch.complex(*projection.chunk(2, dim=1))
