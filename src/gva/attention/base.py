"""What every attention shares: queries, the cache, the choice between two forms, the call into a kernel.

A subclass says in `project` what its queries, keys and values are and what of them is cached.
Tensors inside are [B, heads, S or T, width]. Head counts are read off tensors, never off the config, so that
the same code runs on the heads of one tensor-parallel rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gva.attention.rope import Rotation
from gva.cache import PagedStep
from gva.errors import check_choice

FORMS = ("expanded", "absorbed")


@dataclass(frozen=True)
class KernelCall:
    """What transformers' attention kernels read off the module that calls them. Not the module itself, because
    how often keys and values are to be repeated depends on the form and on the number of queries; and nothing
    that differs between layers, so that all of them compile to one graph."""

    config: Any
    training: bool
    num_key_value_groups: int
    is_causal: bool = True


class RMSNorm(nn.RMSNorm):
    """Computed in the precision of its gain, so that autocast does not square half-precision numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Base of all attentions."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.score_dim**-0.5
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * config.score_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.value_head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.score_dim, eps=config.rms_norm_eps) if config.query_norm else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotation,
        key_position_embeddings: Rotation | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | PagedStep | None = None,
        attention_form: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from hidden_states [B, S, hidden_size]; returns the same shape and the weights, if the kernel
        gives them. `attention_form` forces 'expanded' or 'absorbed'; None takes the cheaper one. Keys that are
        rebuilt from a cache have positions of their own."""
        form = self.choose_form(attention_form, past_key_values is not None, hidden_states.shape[1])
        positions = position_embeddings, key_position_embeddings or position_embeddings
        q, k, v = self.project(hidden_states, positions, past_key_values, form)
        if isinstance(past_key_values, PagedStep):
            attended, weights = past_key_values.attend(self, q, k, v), None
        else:
            attended, weights = self.attend(q, k, v, attention_mask, **kwargs)
        joined = self.values_of(attended, form).transpose(1, 2).flatten(2)
        return self.o_proj(joined), weights

    def project(
        self, hidden_states: Tensor, positions: tuple[Rotation, Rotation], cache: Cache | PagedStep | None, form: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of hidden_states and, after the cache took what it keeps, the keys and values of all
        tokens: q [B, H, S, d_qk], k and v [B, H or G, T, ...]. `positions` are those of queries and of keys."""
        raise NotImplementedError

    def values_of(self, attended: Tensor, form: str) -> Tensor:
        """Attended values [B, H, S, d_h]; the attended state itself, unless absorption leaves something to do."""
        return attended

    def slices(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        """Unrotated q_nope, k_nope, q_rope, k_rope and v of hidden_states, for diagnostics. Without a decoupled
        slice the whole head counts as content and the rope entries are None."""
        raise NotImplementedError

    def queries(self, hidden_states: Tensor) -> Tensor:
        """[B, H, S, d_qk], normalised if the config says so: before the split, before absorption."""
        q = split_heads(self.q_proj(hidden_states), self.config.score_dim)
        return q if self.q_norm is None else self.q_norm(q)

    def split_query(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q_nope [.., d_n] and q_rope [.., d_r]: the head layout is [nope | rope]."""
        q_nope, q_rope = q.split((self.config.content_dim, self.config.rope_dim), dim=-1)
        return q_nope, q_rope

    def break_even(self) -> float:
        """The number of queries up to which the absorbed form is the cheaper one; 0 where there is none."""
        return 0

    def choose_form(self, asked: str | None, cached: bool, queries: int) -> str:
        """The form to run. Absorbing maps S queries instead of T keys but widens every score, so it pays while
        there are fewer queries than `break_even()`, and only where earlier tokens may lie in a cache."""
        if asked is None:
            return "absorbed" if self.config.absorbs and cached and queries <= self.break_even() else "expanded"
        check_choice("attention_form", asked, FORMS)
        if asked == "absorbed" and not self.config.absorbs:
            raise ValueError(
                f"attention_form='absorbed': attention={self.config.attention!r} with positional="
                f"{self.config.positional!r} cannot absorb its key map, because the rotation between a query and "
                "a key depends on both positions; use attention_form='expanded' or positional='decoupled'"
            )
        return asked

    def update_cache(self, cache: Cache | PagedStep | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append to the cache, if there is one, and return all that it then holds."""
        if cache is None:
            return keys, values
        if isinstance(cache, PagedStep):
            return cache.update(keys, values)
        layers = getattr(cache, "layers", [])
        if self.layer_idx < len(layers):
            for what, new in (("keys", keys), ("values", values)):
                held = getattr(layers[self.layer_idx], what, None)
                if held is not None and held.dim() == 4 and unchanging(held) != unchanging(new):
                    raise ValueError(
                        f"past_key_values: layer {self.layer_idx} holds {what} of shape {tuple(held.shape)} and "
                        f"{held.dtype}, this model caches {tuple(new.shape)} (batch, heads, tokens, width) and "
                        f"{new.dtype}; the cache belongs to another model or batch"
                    )
        return cache.update(keys, values, self.layer_idx)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """softmax(q k^T * scaling) v through the backend the config names.

        q [B, H, S, d_qk], k [B, H or G, T, d_qk], v [B, H or G, T, w] -> [B, H, S, w].
        """
        heads, kept = q.shape[1], v.shape[1]
        if k.shape[1] != kept:  # keys per head, values per group: kernels want as many of one as of the other
            k, v, kept = repeat_heads(k, heads), repeat_heads(v, heads), heads
        name = self.config._attn_implementation
        # One query token: the heads of a group become the query rows of one head, and nothing is repeated.
        fold = q.shape[2] == 1 and kept < heads and name in ("sdpa", "eager")
        if fold:
            q = q.unflatten(1, (kept, -1)).squeeze(3)
            kwargs["is_causal"] = False
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        call = KernelCall(self.config, self.training, q.shape[1] // kept)
        out, weights = kernel(call, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        out = out.transpose(1, 2)  # kernels answer [B, S, H, w]
        if fold:
            out = out.flatten(1, 2).unsqueeze(2)
            weights = None if weights is None else weights.flatten(1, 2).unsqueeze(2)
        return out, weights


def split_heads(x: Tensor, width: int) -> Tensor:
    """[B, S, heads * width] -> [B, heads, S, width]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each head of x [B, n, T, w] repeated in place until there are `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def unchanging(x: Tensor) -> tuple[Any, ...]:
    """What stays the same while a cache grows: batch, heads, width and precision."""
    return x.shape[0], x.shape[1], x.shape[3], x.dtype


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight that tensor parallelism may have sharded."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


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
