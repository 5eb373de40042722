"""How the HuggingFace model attends: over keys side by side, in transformers' kernels and transformers' caches.

A cache of transformers has two tensors per layer, called keys and values, [B, heads, T, width]. Where a row is keys and
values of as many heads, they are those. Elsewhere there is one head, which is what every cache can hold: the rotated
key stands among the keys, the rest side by side among the values; a row of values alone stands among the keys, since a
cache tells its length from them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gva.attention.base import Attention, Cached, Query
from gva.attention.decoupled import join
from gva.attention.rope import Rotation
from gva.ops import decode


@dataclass(frozen=True)
class SideBySide:
    """Attention of new tokens [B, S] to themselves and to what `cache` holds; the `attend` of a forward pass.

    form           'expanded', 'absorbed', or None: the cheaper one
    key_rotation   of every slot of the cache, for keys that rotate late
    options        for transformers' kernels
    kernel         the name of one of them; None: the one that the attention's config names
    """

    mask: Tensor | None = None
    cache: Cache | None = None
    form: str | None = None
    key_rotation: Rotation | None = None
    options: dict[str, Any] = field(default_factory=dict)
    kernel: str | None = None

    def __call__(self, attention: Attention, query: Query, row: Cached) -> tuple[Tensor, Tensor | None]:
        form = attention.choose_form(self.form, self.cache is not None, query.content.shape[1])
        held = row if self.cache is None else update(self.cache, attention, row)
        kernel = self.kernel or attention.config._attn_implementation
        if form == "expanded":
            if attention.looks_back and self.mask is not None:
                held = (*held, content_before(held[0], self.mask))
            k, v = attention.expand(held, self.key_rotation)
            return attend(attention, query.whole, k, v, self.mask, self.options, kernel)
        (state, k_rope), mask = held, self.mask
        query = Query(attention.absorb(query.content), query.rope)
        if self._in_place(query, state, k_rope, kernel):
            assert query.rope is not None
            attended = decode.tensors(query.content, query.rope, state, k_rope, mask, attention.scaling)
            return attention.values_of(attended), None
        if self._apart(query, state, kernel):
            q, k, mask = query.content, state, rope_scores(attention, query, k_rope, mask)
        else:
            q, k = query.whole, join(state, k_rope)
        attended, weights = attend(attention, q, k, state, mask, self.options, kernel)
        return attention.values_of(attended), weights

    def _in_place(self, query: Query, state: Tensor, k_rope: Tensor, kernel: str | None) -> bool:
        """Whether our kernel for processors reads the cache as it lies."""
        S, mask = query.content.shape[1], self.mask
        if self.cache is None or kernel != "sdpa":
            return False
        shown = S == 1 if mask is None else mask.dtype == torch.bool and mask.shape[1:] == (1, S, state.shape[1])
        assert query.rope is not None
        return shown and decode.takes(query.content, query.rope, state, k_rope)

    def _apart(self, query: Query, state: Tensor, kernel: str | None) -> bool:
        """Whether scores of the slice are taken by themselves, which leaves the cache as it lies. They are S H numbers
        of a cached token; keys joined to the slice would be as many as their width."""
        S, H, width = query.content.shape[1:]
        assert query.rope is not None
        few = S * H // state.shape[2] <= width + query.rope.shape[3] and (S == 1 or self.mask is not None)
        return few and self.cache is not None and kernel in FOLDING


def update(cache: Cache, attention: Attention, row: Cached) -> Cached:
    """Append the new tokens' row to the cache; returns all that it then holds."""
    declared = attention.row(attention.config)
    per_head = declared.rope is None and len(declared.content) == 2
    parts = [(x if per_head else x.flatten(2)[:, :, None]).transpose(1, 2) for x in row]
    if not per_head:  # the slice, or all that there is, stands among the keys
        *others, keys = parts
        parts = [keys, torch.cat(others, -1) if others else keys[..., :0]]
    _refuse_foreign(cache, attention.layer_idx, parts)
    held = [x.transpose(1, 2) for x in cache.update(*parts, attention.layer_idx)]
    if per_head:
        return tuple(held)
    keys, others = (x.squeeze(2) for x in held)
    ordered = (*others.split([new.flatten(2).shape[2] for new in row[:-1]], -1), keys)
    return tuple(
        x if new.dim() == 3 else x.unflatten(2, (-1, new.shape[3])) for x, new in zip(ordered, row, strict=True)
    )


def rope_scores(attention: Attention, query: Query, k_rope: Tensor, mask: Tensor | None) -> Tensor:
    """The slice's part of scaled scores [B, H, S, T], for kernels to add to the rest as they add a mask; `mask` is in
    it. query.rope [B, S, H, d_r], k_rope [B, T, d_r]."""
    assert query.rope is not None
    q, k = (query.rope * attention.scaling).transpose(1, 2), k_rope.transpose(1, 2)
    B, H, S, _ = q.shape
    q = q.flatten(1, 2)
    if mask is None:
        return torch.bmm(q, k).unflatten(1, (H, S))
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return torch.baddbmm(mask.expand(B, H, -1, -1).flatten(1, 2), q, k).unflatten(1, (H, S))


def content_before(content: Tensor, mask: Tensor) -> Tensor:
    """Of each token of content [B, T, heads, width] that of the token before it, zeros where there is none: the newest
    earlier one that is seen by who sees this one. `mask` [B, 1, S, T] is of booleans, or what is added to scores."""
    seen = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0, :, : content.shape[1]]
    newest = torch.arange(seen.shape[2], device=mask.device).where(seen, -1).cummax(-1).values
    newest = torch.nn.functional.pad(newest[..., :-1], (1, 0), value=-1)  # before each slot, for each query
    who = seen.byte().argmax(1, keepdim=True)  # the first query that sees a slot
    at = newest.gather(1, who)[:, 0, :, None, None].expand(content.shape)
    return content.gather(1, at.clamp(min=0)).masked_fill(at < 0, 0)


def _refuse_foreign(cache: Cache, layer: int, parts: list[Tensor]) -> None:
    layers = getattr(cache, "layers", [])
    if layer >= len(layers):
        return
    for what, new in zip(("keys", "values"), parts, strict=True):
        held = getattr(layers[layer], what, None)
        if held is not None and held.dim() == 4 and unchanging(held) != unchanging(new):
            raise ValueError(
                f"past_key_values: layer {layer} holds {what} of shape {tuple(held.shape)} and {held.dtype}, this "
                f"model caches {tuple(new.shape)} (batch, heads, tokens, width) and {new.dtype}; the cache belongs to "
                "another model or batch"
            )


def unchanging(x: Tensor) -> tuple[Any, ...]:
    """What stays the same while a cache grows: batch, heads, width and precision."""
    return x.shape[0], x.shape[1], x.shape[3], x.dtype


# ---- transformers' kernels ----

FOLDING = ("sdpa", "eager")  # those that take any number of query rows of a head, and any mask that is added


@dataclass(frozen=True)
class KernelCall:
    """What transformers' attention kernels read off the module that calls them. Not the module itself, because
    how often keys and values are to be repeated depends on the form and on the number of queries; and nothing
    that differs between layers, so that all of them compile to one graph."""

    config: Any
    training: bool
    num_key_value_groups: int
    is_causal: bool = True


def attend(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    name: str | None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q k^T * scaling) v through the backend of this name.

    q [B, S, H, d_qk], k [B, T, H or G, d_qk], v [B, T, H or G, w] -> [B, S, H, w], and the weights if there are any.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    heads, kept = q.shape[1], v.shape[1]
    if k.shape[1] != kept:  # keys per head, values per group: kernels want as many of one as of the other
        k, v, kept = repeat_heads(k, heads), repeat_heads(v, heads), heads
    # One query token, or a mask for each head: the heads of a group become the query rows of one head, and nothing is
    # repeated.
    S, of_heads = q.shape[2], mask is not None and mask.shape[1] == heads
    fold = (S == 1 or of_heads) and kept < heads and name in FOLDING
    if fold:
        q = q.unflatten(1, (kept, -1)).flatten(2, 3)
        mask = mask.unflatten(1, (kept, -1)).flatten(2, 3) if mask is not None and of_heads else mask
        options = {**options, "is_causal": False}
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
    call = KernelCall(attention.config, attention.training, q.shape[1] // kept)
    out, weights = kernel(call, q, k, v, mask, dropout=0.0, scaling=attention.scaling, **options)
    if fold:  # kernels answer [B, S, H, w]: here the heads of a group and their queries, then the groups
        out = out.transpose(1, 2).unflatten(2, (-1, S)).flatten(1, 2).transpose(1, 2)
        weights = None if weights is None else weights.unflatten(2, (-1, S)).flatten(1, 2)
    return out, weights


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each head of x [B, n, T, w] repeated in place until there are `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention that returns its weights, in transformers' calling convention."""
    key = repeat_heads(key, query.shape[1])
    value = repeat_heads(value, query.shape[1])
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = weights.to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
