"""How each matrix starts (the paper's appendix A): the one place that knows standard deviations."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor


def weight_std(config: Any, name: str) -> float:
    """The standard deviation at which the matrix called `name` (its last module name) is drawn.

    Hidden states enter a block normalised to RMS 1, so a projection drawn at s gives outputs of RMS
    s sqrt(hidden_size): sigma_Q and sigma_V are known without a forward pass. Every slice is matched on its
    own, because pooling content and position hides a mismatch.
    """
    standard = config.initializer_range
    if name in ("o_proj", "down_proj"):
        return standard / math.sqrt(2 * config.num_hidden_layers)
    if name == "back_map":
        return 0.0
    if config.map_init in ("scale_matched", "none"):
        sigma_v = standard * math.sqrt(config.hidden_size)
        sigma_q = 1.0 if config.query_norm else sigma_v
        if name == "key_map":
            return sigma_q / (sigma_v * math.sqrt(config.value_head_dim))
        if name == "k_rope_proj":
            return sigma_q / math.sqrt(config.hidden_size)
    return standard


def draw(seed: int, name: str, like: Tensor, std: float) -> Tensor:
    """Normal numbers for the parameter called `name`, the same wherever and in whatever order it is drawn.

    Seeding by name is what lets two variants under one seed share every parameter they have in common.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu")
    return (numbers * std).to(device=like.device, dtype=like.dtype)
