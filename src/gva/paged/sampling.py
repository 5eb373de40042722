"""The next token of each sequence, chosen on the device without waiting for it: a captured step holds all of this.

A sequence draws with one number per token, a hash of its key and of its length. So what a prompt is continued with
depends on the seed and on its place among the prompts, not on the batch around it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gva.errors import check

_STEP, *_FACTORS = (c - (c >> 63 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Sampler:
    """`temperature` 0 takes the likeliest token; `top_k` the k likeliest alone and whatever equals the last of them;
    `top_p` the fewest likeliest tokens that together have this probability, after `top_k`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.temperature >= 0, "temperature", self.temperature, "must not be negative")
        check(self.top_k is None or self.top_k > 0, "top_k", self.top_k, "must be positive, or None for all tokens")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")
        check(0 <= self.seed < 2**63, "seed", self.seed, "must not be negative, and less than 2**63")
        for name, none in (("top_k", None), ("top_p", 1.0)):
            chosen = getattr(self, name)
            rule = "the likeliest token is taken whatever it is; give a temperature, 1.0 for the model's own"
            check(self.temperature > 0 or chosen == none, name, chosen, rule)

    def keys(self, numbers: list[int], device: torch.device | str = "cpu") -> Tensor:
        """Of prompts with these numbers, [N] int64."""
        seed = _mixed(torch.tensor(self.seed, device=device))
        return _mixed(seed + torch.tensor(numbers, dtype=torch.long, device=device) * _STEP)

    def choose(self, logits: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
        """Tokens [N] of logits [N, vocabulary], for sequences with these keys, of so many tokens [N]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        # In float64, so that a sum over a large vocabulary leaves no token out.
        heaped = self.filtered(logits).double().softmax(-1).cumsum(-1)
        drawn = uniform(keys, lengths)[:, None] * heaped[:, -1:]
        return torch.searchsorted(heaped, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits in float32 at this temperature, -inf where a token is left out."""
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, tokens = scores.sort(-1)
            out = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            out[..., -1] = False
            scores = scores.masked_fill(out.scatter(-1, tokens, out), -torch.inf)
        return scores


def uniform(keys: Tensor, lengths: Tensor) -> Tensor:
    """A number in [0, 1) for each sequence, [N] float64: the upper half of the hash."""
    return ((_mixed(keys + lengths.long() * _STEP) >> 32) & 0xFFFFFFFF).double() * 2.0**-32


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of an int64 depends on every other. Shifts keep the sign, hence the masks."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))
