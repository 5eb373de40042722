"""A layer for one's own model: Grouped Value Attention as a module of plain torch, with its cache.

    attention = GroupedValueAttention(hidden_size=512, num_heads=8)
    y = attention(x)                                # [B, S, hidden_size]; causal, trains
    cache = attention.make_cache(batch=B, max_tokens=1024)
    with torch.no_grad():
        y = attention(prompt, cache)                # expanded: keys are built
        y = attention(token, cache)                 # absorbed: no content key exists

Weights have the names that they have in the layers of `gva.GvaForCausalLM`, so the state of one loads into the other.
"""

import sys
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gva.attention import gva
from gva.attention.base import Cached, Query
from gva.attention.init import weight_std
from gva.attention.rope import tables
from gva.attention.shape import Shape
from gva.errors import check
from gva.ops.dense import Spans
from gva.paged.attend import Absorbed, Expanded, Stretch, attend, slots_of, together
from gva.paged.cache import PagedCache
from gva.presets import VARIANTS


@dataclass
class _LayerConfig(Shape):
    """What an attention asks of its config, for one layer alone."""

    hidden_size: int
    num_attention_heads: int
    num_value_groups: int | None
    value_head_dim: int | None
    rope_dim: int | None
    rope_allocation: str | None
    map_init: str | None
    query_norm: bool
    qkv_bias: bool
    output_bias: bool
    rope_theta: float
    num_hidden_layers: int
    attention: str = "gva"
    positional: str = "decoupled"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_frequencies: None = None
    score_scale: None = None
    latent_dim: None = None
    latent_norm: bool = True
    max_position_embeddings: int = sys.maxsize  # nothing here depends on the context
    rope_parameters: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_attention_heads", "num_value_groups", "value_head_dim", "rope_dim"):
            value = getattr(self, name)
            check(value is None or value > 0, name, value, "must be positive")
        self._resolve_attention()
        self.rope_parameters = {"rope_type": "default", "rope_theta": self.rope_theta}

    @property
    def layer_configs(self) -> list["_LayerConfig"]:
        return [self]


class GroupedValueAttention(gva.GroupedValueAttention):
    """Causal self-attention whose cache holds G d_h + d_r scalars a token: grouped values and one rotated slice.

    hidden_size, num_heads: H query heads. num_groups: G value groups, a divisor of H. head_dim: d_h, by default
        hidden_size / H. rope_dim: d_r, the width of the slice. What is left out is as in the variant `gva`, the one
        that we recommend.
    rope_allocation: 'carved' takes the slice out of the head, 'additive' puts it beside; by default carved wherever the
        head is wider. map_init: 'scale_matched', 'standard', or 'none' for no maps. query_norm: RMSNorm of queries.
    causal: False lets every token see all others; there is no cache then.
    num_layers: of the model, by whose number the output projection starts smaller.

    It starts scale-matched for an input of RMS 1, so put a norm before it. `reset_parameters` draws the weights anew.
    Not supported: padding on the left or inside a batch, documents packed into one sequence, gradients through a cache.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_groups: int | None = None,
        *,
        head_dim: int | None = None,
        rope_dim: int | None = None,
        rope_allocation: str | None = None,
        rope_theta: float = 10000.0,
        map_init: str | None = None,
        query_norm: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
        causal: bool = True,
        num_layers: int = 12,
    ) -> None:
        given: dict[str, Any] = {"num_value_groups": num_groups, "rope_dim": rope_dim, "map_init": map_init}
        given |= {"rope_allocation": rope_allocation, "query_norm": query_norm, "rope_theta": rope_theta}
        given |= {"qkv_bias": qkv_bias, "output_bias": output_bias, "num_hidden_layers": num_layers}
        for name, usual in VARIANTS["gva"].items():
            if given.get(name, usual) is None:
                given[name] = usual
        config = _LayerConfig(hidden_size, num_attention_heads=num_heads, value_head_dim=head_dim, **given)
        super().__init__(config)
        self.causal = causal
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=weight_std(self.config, name))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def make_cache(self, batch: int, max_tokens: int, **options: Any) -> PagedCache:
        """Room for `batch` sequences of up to `max_tokens` tokens, on the device and in the precision of the weights.
        Options are those of `gva.PagedCache`; `cache.release(i)` ends sequence i, whose place then begins anew."""
        weight = self.o_proj.weight
        return PagedCache(self.config, batch, max_tokens, **{"dtype": weight.dtype, "device": weight.device, **options})

    def forward(self, x: Tensor, cache: PagedCache | None = None, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """x [B, S, hidden_size] -> the same shape. With a cache, S new tokens of every sequence follow what it holds.

        positions: [S] or [B, S], by which the slice turns; by default 0, 1, ..., or on from what is cached. Which
            tokens a token sees follows their order alone.
        """
        width = self.config.hidden_size
        check(x.dim() == 3 and x.shape[-1] == width, "x", tuple(x.shape), f"must be [batch, tokens, {width}]")
        batch, count = x.shape[:2]
        if cache is None:
            at = torch.arange(count, device=x.device) if positions is None else positions
            return super().forward(x, tables(self.config, at, x.dtype), self._attend)[0]
        check(self.causal, "causal", self.causal, "tokens that are still to come are not in a cache; leave cache out")
        check(batch == cache.batch, "x", tuple(x.shape), f"the cache has {cache.batch} sequences")
        if torch.is_grad_enabled():
            raise RuntimeError("cache: keeps no gradients; call the layer under torch.no_grad(), or without a cache")
        step = _Step(cache, count)
        at = step.positions if positions is None else positions.expand(batch, count)
        rotation = tables(self.config, at.flatten(), x.dtype)
        return super().forward(x.flatten(0, 1), rotation, step)[0].unflatten(0, (batch, count))

    def _attend(self, attention: Any, query: Query, row: Cached) -> tuple[Tensor, None]:
        """Of the new tokens to themselves, keys being built."""
        q, (k, v) = query.whole, self.expand(row)
        k, v = (part.repeat_interleave(q.shape[-2] // part.shape[-2], dim=-2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scaling)
        return out.transpose(1, 2), None


class _Step:
    """`count` new tokens of every sequence of a cache: the `attend` of one forward pass, which writes them."""

    def __init__(self, cache: PagedCache, count: int) -> None:
        self.cache, self.count, self.held = cache, count, list(cache.lengths)
        self.positions = cache.seq_lens[:, None] + torch.arange(count, device=cache.seq_lens.device)
        cache.reserve([count] * cache.batch)
        cache.advance([count] * cache.batch)

    def __call__(self, attention: Any, query: Query, row: Cached) -> tuple[Tensor, None]:
        cache = self.cache
        sequences = torch.arange(cache.batch, device=self.positions.device).repeat_interleave(self.count)
        out = query.content.new_empty(*query.content.shape[:2], attention.config.value_head_dim)
        slots = cache.slots(self.positions.flatten(), sequences)
        attend(attention, cache.layer(0), query, row, slots, self._stretches(attention), out)
        return out, None

    def _stretches(self, attention: Any) -> list[Stretch]:
        cache = self.cache
        if attention.choose_form(None, any(self.held), self.count) == "absorbed":
            tokens = slice(0, cache.batch * self.count)
            return [Absorbed(tokens, cache.block_table, cache.seq_lens, None, self.count, None)]
        lengths = [held + self.count for held in self.held]
        return [self._expanded(lengths, *part) for part in together(lengths)]

    def _expanded(self, lengths: list[int], first: int, last: int) -> Expanded:
        queries, keys = self._spans([self.count] * (last - first)), self._spans(lengths[first:last])
        slots = slots_of(self.cache.block_table[first:last], keys, self.cache.page) if any(self.held) else None
        return Expanded(slice(first * self.count, last * self.count), queries, keys, slots)

    def _spans(self, counts: list[int]) -> Spans:
        starts = list(accumulate(counts, initial=0))
        return Spans(starts, torch.tensor(starts, dtype=torch.int32, device=self.positions.device))
