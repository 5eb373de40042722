"""Looking inside: the scales of queries and keys, the size of a cache that really exists."""

from typing import Any

import torch
from torch import Tensor

from gva.attention import Attention

SLICES = ("q_nope", "k_nope", "q_rope", "k_rope", "v")


@torch.no_grad()
def qk_scales(model: torch.nn.Module, batch: Tensor) -> list[dict[str, float | None]]:
    """RMS of q_nope, k_nope, q_rope, k_rope and v in each layer, over the tokens `batch` [B, T] and all heads.

    Queries are measured after any query norm. Without a decoupled slice the whole head counts as content
    and the rope entries are None; a rotation changes no RMS.
    """
    measured: dict[int, dict[str, float | None]] = {}

    def measure(module: Attention, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        slices = module.slices(hidden)
        measured[module.layer_idx] = {
            name: None if (part := slices[name]) is None else part.float().square().mean().sqrt().item()
            for name in SLICES
        }

    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    hooks = [m.register_forward_pre_hook(measure, with_kwargs=True) for m in attentions]
    try:
        model(batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [measured[layer] for layer in sorted(measured)]


def cache_scalars_per_token_per_layer(cache: Any) -> float:
    """Scalars that a filled transformers cache holds per token (or slot) and layer, counted on its tensors."""
    scalars = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    tokens = cache.layers[0].keys.shape[0] * cache.layers[0].keys.shape[2]
    return scalars / (tokens * len(cache.layers))
