"""Looking inside: scales of queries and keys, attention to the previous token, the size of a real cache.

Each look rides on a forward pass that the caller may supply as `run`, so that it works on a model that is
compiled or spread over ranks: hooks see the inputs of every attention, and measure from what it projects of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gva.attention import Attention
from gva.attention.rope import Rotation, rotate
from gva.caches import repeat_heads

Run = Callable[[], Any]


@torch.no_grad()
def qk_scales(model: nn.Module, batch: Tensor, run: Run | None = None) -> list[dict[str, float | None]]:
    """RMS of q_nope, k_nope, q_rope, k_rope and v in each layer, over the tokens `batch` [B, T] and all heads.

    Queries are measured after any query norm. Without a decoupled slice the whole head counts as content
    and the rope entries are None; a rotation changes no RMS.
    """

    def look(module: Attention, hidden: Tensor, rotation: Rotation) -> dict[str, float | None]:
        return {name: None if s is None else _rms(s) for name, s in unrotated(module, hidden).items()}

    return observe(model, run or (lambda: model(batch, use_cache=False)), look)


@torch.no_grad()
def previous_token_attention(model: nn.Module, batch: Tensor, run: Run | None = None) -> list[list[float]]:
    """The mean weight each head of each layer gives to the token before, over the tokens `batch` [B, T].

    Documents packed into one row are not told apart: give rows of running text.
    """

    def look(module: Attention, hidden: Tensor, rotation: Rotation) -> list[float]:
        weights = attention_weights(module, hidden, rotation)
        return weights.diagonal(offset=-1, dim1=2, dim2=3).mean((0, 2)).tolist()

    return observe(model, run or (lambda: model(batch, use_cache=False)), look)


def unrotated(module: Attention, hidden: Tensor) -> dict[str, Tensor | None]:
    """q_nope, k_nope, q_rope, k_rope and v of hidden [B, S, hidden_size], as [B, S, heads, width] before any rotation.
    Without a decoupled slice the whole head counts as content and the rope entries are None."""
    still = torch.ones(1, device=hidden.device), torch.zeros(1, device=hidden.device)
    query, row = module.project(hidden, still)
    k, v = module.expand(row, still)
    k_nope, k_rope = (k, None) if query.rope is None else (k[..., : query.content.shape[-1]], row[-1].unsqueeze(2))
    return {"q_nope": query.content, "k_nope": k_nope, "q_rope": query.rope, "k_rope": k_rope, "v": v}


@torch.no_grad()
def attention_weights(module: Attention, hidden: Tensor, rotation: Rotation) -> Tensor:
    """Causal attention weights [B, H, T, T] of one layer in float32, from what it projects and not from its kernel."""
    s = {name: None if part is None else part.float() for name, part in unrotated(module, hidden).items()}
    q_nope, k_nope, q_rope, k_rope = s["q_nope"], s["k_nope"], s["q_rope"], s["k_rope"]
    assert q_nope is not None
    assert k_nope is not None

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q.transpose(1, 2) @ repeat_heads(k.transpose(1, 2), q.shape[2]).mT

    if q_rope is None or k_rope is None:
        total = scores(rotate(q_nope, rotation), rotate(k_nope, rotation))
    else:
        total = scores(q_nope, k_nope) + scores(rotate(q_rope, rotation), rotate(k_rope, rotation))
    future = torch.ones(total.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    return (total * module.scaling).masked_fill(future, float("-inf")).softmax(-1)


def cache_scalars_per_token_per_layer(cache: Any) -> float:
    """Scalars that a filled transformers cache holds per token (or slot) and layer, counted on its tensors."""
    scalars = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    tokens = cache.layers[0].keys.shape[0] * cache.layers[0].keys.shape[2]
    return scalars / (tokens * len(cache.layers))


def observe(model: nn.Module, run: Run, look: Callable[..., Any]) -> list[Any]:
    """What `look` says of each attention's inputs during `run`, in the order of layers."""
    seen: dict[int, Any] = {}

    def hook(module: Attention, args: tuple) -> None:
        hidden, rotation, _ = args
        seen[module.layer_idx] = look(module, hidden, rotation)

    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    hooks = [m.register_forward_pre_hook(hook) for m in attentions]
    try:
        run()
    finally:
        for registered in hooks:
            registered.remove()
    return [seen[layer] for layer in sorted(seen)]


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()
