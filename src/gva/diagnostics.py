"""Looking inside: scales of queries and keys, attention to the previous token, the size of a real cache.

Each look rides on a forward pass that the caller may supply as `run`, so that it works on a model that is
compiled or spread over ranks: hooks see the inputs of every attention, and measure from its `slices`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gva.attention import Attention
from gva.attention.base import repeat_heads
from gva.attention.rope import rotate

SLICES = ("q_nope", "k_nope", "q_rope", "k_rope", "v")
Run = Callable[[], Any]


@torch.no_grad()
def qk_scales(model: nn.Module, batch: Tensor, run: Run | None = None) -> list[dict[str, float | None]]:
    """RMS of q_nope, k_nope, q_rope, k_rope and v in each layer, over the tokens `batch` [B, T] and all heads.

    Queries are measured after any query norm. Without a decoupled slice the whole head counts as content
    and the rope entries are None; a rotation changes no RMS.
    """

    def look(module: Attention, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> dict[str, float | None]:
        slices = module.slices(hidden)
        return {name: None if (s := slices[name]) is None else _rms(s) for name in SLICES}

    return observe(model, run or (lambda: model(batch, use_cache=False)), look)


@torch.no_grad()
def previous_token_attention(model: nn.Module, batch: Tensor, run: Run | None = None) -> list[list[float]]:
    """The mean weight each head of each layer gives to the token before, over the tokens `batch` [B, T].

    Documents packed into one row are not told apart: give rows of running text.
    """

    def look(module: Attention, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> list[float]:
        weights = attention_weights(module, hidden, positions)
        return weights.diagonal(offset=-1, dim1=2, dim2=3).mean((0, 2)).tolist()

    return observe(model, run or (lambda: model(batch, use_cache=False)), look)


@torch.no_grad()
def attention_weights(module: Attention, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention weights [B, H, T, T] of one layer in float32, from its slices and not from its kernel."""
    s = {name: None if part is None else part.float() for name, part in module.slices(hidden).items()}
    q_nope, k_nope, q_rope, k_rope = s["q_nope"], s["k_nope"], s["q_rope"], s["k_rope"]
    assert q_nope is not None
    assert k_nope is not None
    k_nope = repeat_heads(k_nope, q_nope.shape[1])
    if q_rope is None or k_rope is None:
        scores = rotate(q_nope, positions) @ rotate(k_nope, positions).mT
    else:
        scores = q_nope @ k_nope.mT + rotate(q_rope, positions) @ rotate(k_rope, positions).mT
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores * module.scaling).masked_fill(future, float("-inf")).softmax(-1)


def cache_scalars_per_token_per_layer(cache: Any) -> float:
    """Scalars that a filled transformers cache holds per token (or slot) and layer, counted on its tensors."""
    scalars = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    tokens = cache.layers[0].keys.shape[0] * cache.layers[0].keys.shape[2]
    return scalars / (tokens * len(cache.layers))


def observe(model: nn.Module, run: Run, look: Callable[..., Any]) -> list[Any]:
    """What `look` says of each attention's inputs during `run`, in the order of layers."""
    seen: dict[int, Any] = {}

    def hook(module: Attention, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen[module.layer_idx] = look(module, hidden, kwargs["position_embeddings"])

    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    hooks = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in attentions]
    try:
        run()
    finally:
        for registered in hooks:
            registered.remove()
    return [seen[layer] for layer in sorted(seen)]


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()
