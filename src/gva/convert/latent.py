"""What is cached beside the slice: one latent for content keys and values of all groups, or the values as they are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gva.convert.layer import Keys, Layer


@dataclass(frozen=True)
class Latent:
    """state = made [x], [width, D], of which content keys and values are linear functions.

    keys        [n, width]
    values      [G, d, width], and values_mean [G, d] beside them
    lost        E (g . error)^2 of a token, g being the gradient of the loss: comparable between layers
    """

    made: Tensor
    keys: Tensor
    values: Tensor
    values_mean: Tensor
    lost: float


def joint_latent(layer: Layer, content: Keys, width: int) -> Latent:
    """The latent from which the loss says the least is missing: principal components of [content keys; values], tokens
    and directions weighed as the moments have them. A mean of content keys is the same for every key of a query, and
    softmax does not see it."""
    G, d = layer.v.shape[:2]
    made = torch.cat((content.of, layer.v.flatten(0, 1)))  # [n + G d, D + 1]
    n = len(content.of)
    met = made @ layer.weighed @ made.T
    mean = made @ layer.weighed[:, -1]
    spread = met - mean[:, None] * mean
    back = torch.block_diag(content.back.flatten(0, 1), torch.eye(G * d, dtype=torch.float64))
    cost = back.T @ layer.slopes @ back
    values, vectors = torch.linalg.eigh(cost)
    root = vectors * values.clamp(min=values.max() * 1e-12).sqrt() @ vectors.T
    kept = torch.linalg.eigh(root @ spread @ root).eigenvectors[:, -width:].flip(-1)
    to = kept.T @ root  # the components of what is made
    scale = (to @ spread * to).sum(1).clamp(min=1e-30).rsqrt() * _usual_scale(layer)
    to = scale[:, None] * to
    seen = spread @ to.T
    back_from = torch.linalg.solve(to @ seen, seen.T, left=True).T  # the best linear guess from the state
    error = spread - back_from @ seen.T
    made_state = to @ made
    from_mean = mean - back_from @ (made_state[:, :-1] @ layer.weighed[:-1, -1])
    return Latent(
        made_state[:, :-1],
        back_from[:n],
        back_from[n:].view(G, d, width),
        from_mean[n:].view(G, d),
        float((cost * error).sum()),
    )


def own_values(layer: Layer, content: Keys) -> tuple[Tensor, float]:
    """Maps [G, n, d] that guess the content keys from the values of each group alone."""
    maps, lost = [], 0.0
    mean = content.of @ layer.weighed[:, -1]
    spread = content.of @ layer.weighed @ content.of.T - mean[:, None] * mean
    for group, v in enumerate(layer.v):
        v_mean = v @ layer.weighed[:, -1]
        v_spread = v @ layer.weighed @ v.T - v_mean[:, None] * v_mean
        v_spread += torch.eye(len(v), dtype=torch.float64) * v_spread.diagonal().mean() * 1e-9
        both = content.of @ layer.weighed @ v.T - mean[:, None] * v_mean
        maps.append(torch.linalg.solve(v_spread, both.T).T)
        back, d = content.back[group], len(v)
        cost = back.T @ layer.slopes[group * d : (group + 1) * d, group * d : (group + 1) * d] @ back
        lost += float((cost * (spread - maps[-1] @ both.T)).sum())
    return torch.stack(maps), lost


def _usual_scale(layer: Layer) -> Tensor:
    """The deviation of one value, which a state should have too: fp8 and optimizers know no other."""
    made = layer.v.flatten(0, 1)
    mean = made @ layer.weighed[:, -1]
    return ((made @ layer.weighed * made).sum(1) - mean.square()).mean().clamp(min=1e-30).sqrt()
