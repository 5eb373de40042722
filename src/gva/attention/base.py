"""What every attention shares. An attention says what it projects, what of that is cached (`row`), and how a query and
cached rows become scores and values, in one form or in two. It knows no cache: whoever calls it brings one.

Tensors are [..., heads, width], where ... is [B, S], or [N] if the tokens of all sequences lie one after another.
Head counts are read off tensors, never off the config, so that the same code runs on the heads of one rank.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gva.attention.rope import Rotation
from gva.attention.row import Part, Row
from gva.errors import check_choice

FORMS = ("expanded", "absorbed")
Cached = tuple[Tensor, ...]  # the parts of a row, in its order: content [..., heads, width], k_rope [..., d_r]


class Query(NamedTuple):
    """content [..., H, d_n], or the whole head where nothing is decoupled; rope [..., H, d_r], rotated."""

    content: Tensor
    rope: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """[..., H, d_qk]: the head layout is [content | rope]."""
        return self.content if self.rope is None else torch.cat((self.content, self.rope), dim=-1)

    def of(self, tokens: slice) -> "Query":
        return Query(self.content[tokens], None if self.rope is None else self.rope[tokens])


class JoinedQuery(NamedTuple):
    """The same where the two lie side by side already."""

    whole: Tensor
    content_dim: int

    @property
    def content(self) -> Tensor:
        return self.whole[..., : self.content_dim]

    @property
    def rope(self) -> Tensor:
        return self.whole[..., self.content_dim :]

    def of(self, tokens: slice) -> "JoinedQuery":
        return JoinedQuery(self.whole[tokens], self.content_dim)


# attend(attention, query, row of the new tokens) -> values [..., H, d_h] and, if there are any, the weights
Attend = Callable[["Attention", Query, Cached], tuple[Tensor, Tensor | None]]


class RMSNorm(nn.RMSNorm):
    """Computed in the precision of its gain, so that autocast does not square half-precision numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Base of all attentions. What a class declares about itself, of a config, comes first; `gva.attention.register`
    makes it known."""

    positional: ClassVar[str] = "rope"  # 'rope' turns whole heads, 'decoupled' a slice
    allocations: ClassVar[tuple[str, ...]] = ("carved",)  # of that slice
    absorbs: ClassVar[bool] = False  # whether a query can be brought into the space of the state
    rotates_late: ClassVar[bool] = False  # keys are rebuilt from what is cached, and rotated then, by their slot
    looks_back: ClassVar[bool] = False  # keys also read the content of the token before
    state_is_value: ClassVar[bool] = True  # what the absorbed form attends to are the values themselves
    fields: ClassVar[tuple[str, ...]] = ()  # optional fields of a config that it has a use for

    @classmethod
    def settle(cls, config: Any) -> None:
        """Fill in fields of the config that only this attention knows, and refuse what it cannot do."""

    @classmethod
    def fixed_groups(cls, heads: int) -> int | None:
        """How many groups there must be, where that is not free."""
        return None

    @classmethod
    def row(cls, config: Any) -> Row:
        """What is cached of a token."""
        raise NotImplementedError

    @classmethod
    def projections(cls, config: Any) -> dict[str, Part]:
        """What is projected from hidden states beside the queries, by name."""
        raise NotImplementedError

    @classmethod
    def maps(cls, config: Any) -> dict[str, tuple[int, int]]:
        """The matrices that every head has one of, by name: the widths of its output and of its input."""
        return {}

    @classmethod
    def norms(cls, config: Any) -> dict[str, int]:
        """RMS norms and their widths."""
        return {"q_norm": config.score_dim} if config.query_norm else {}

    @classmethod
    def decode_widths(cls, config: Any) -> tuple[int, int]:
        """How wide a score and an attended value of one head are when it decodes in the fewest FLOPs."""
        if cls.absorbs:
            width = cls.row(config).content[0].width
            return width + config.rope_dim, width
        return config.score_dim, config.value_head_dim

    def __init__(self, config: Any, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.scaling
        heads = config.num_attention_heads
        self.make_inputs({"q_proj": Part(heads, config.score_dim), **self.projections(config)})
        self.o_proj = self.make_output(heads * config.value_head_dim, config.hidden_size)
        self.q_norm: Any = None
        for name, width in self.norms(config).items():
            setattr(self, name, self.make_norm(width))
        for name, (width, inner) in self.maps(config).items():
            setattr(self, name, self.make_map(name, heads, width, inner))

    # ---- parameters; serving overrides these, for projections that are sharded ----

    def make_inputs(self, parts: dict[str, Part]) -> None:
        self.input_widths = {name: part.width for name, part in parts.items()}
        for name, part in parts.items():
            setattr(self, name, nn.Linear(self.config.hidden_size, part.size, bias=self.config.qkv_bias))

    def make_output(self, width: int, hidden_size: int) -> nn.Module:
        return nn.Linear(width, hidden_size, bias=self.config.output_bias)

    def make_norm(self, width: int) -> nn.Module:
        return RMSNorm(width, eps=self.config.rms_norm_eps)

    def make_map(self, name: str, heads: int, width: int, inner: int) -> nn.Module:
        return nn.Linear(inner, heads * width, bias=False)

    def inputs(self, hidden_states: Tensor) -> list[Tensor]:
        """The queries, normalised if the config says so, and every projection: [..., heads, width] each."""
        q, *others = (
            getattr(self, name)(hidden_states).unflatten(-1, (-1, width)) for name, width in self.input_widths.items()
        )
        return [q if self.q_norm is None else self.q_norm(q), *others]

    # ---- what it computes ----

    def forward(self, hidden_states: Tensor, rotation: Rotation, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """hidden_states [..., hidden_size] -> the same shape, and the weights, if `attend` gives them."""
        attended, weights = attend(self, *self.project(hidden_states, rotation))
        return self.o_proj(attended.flatten(-2)), weights

    def project(self, hidden_states: Tensor, rotation: Rotation) -> tuple[Query, Cached]:
        """Queries of the new tokens, and what is to be cached of them."""
        raise NotImplementedError

    def expand(self, row: Cached, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """Keys [..., H or G, d_qk] and values [..., H or G, d_h] of cached tokens; `rotation` is theirs, for keys that
        rotate late."""
        raise NotImplementedError

    def expand_at(self, pages: Cached, slots: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """The same of tokens that lie in pages [P, page, ...] of each part, at slots [T]."""
        at = slots // pages[0].shape[1], slots % pages[0].shape[1]
        return self.expand(tuple(part[at] for part in pages), rotation)

    def absorb(self, content: Tensor) -> Tensor:
        """Queries [..., H, width] for the state as it is cached, from their content [..., H, d_n]."""
        raise NotImplementedError

    def values_of(self, attended: Tensor) -> Tensor:
        """Values [..., H, d_h] of what the absorbed form attended to."""
        return attended

    # ---- which form ----

    def break_even(self) -> float:
        """The number of queries up to which the absorbed form is the cheaper one; 0 where there is none."""
        return 0

    def choose_form(self, asked: str | None, cached: bool, queries: int) -> str:
        """The form to run. Absorbing maps S queries instead of T keys but widens every score, so it pays while
        there are fewer queries than `break_even()`, and only where earlier tokens may lie in a cache."""
        if asked is None:
            return "absorbed" if self.absorbs and cached and queries <= self.break_even() else "expanded"
        check_choice("attention_form", asked, FORMS)
        if asked == "absorbed" and not self.absorbs:
            why = "cannot absorb its key map: its class declares no absorbed form; use attention_form='expanded'"
            if self.positional == "rope":
                why = (
                    "cannot absorb its key map, because the rotation between a query and a key depends on both "
                    "positions; use attention_form='expanded' or positional='decoupled'"
                )
            raise ValueError(
                f"attention_form='absorbed': attention={self.config.attention!r} with positional="
                f"{self.config.positional!r} {why}"
            )
        return asked


def per_head(module: Any, width: int, like: Tensor) -> Tensor:
    """The matrices of a map, [H, width, inner], for a product with `like`.

    They are the weight of a linear layer, which tensor parallelism may have sharded. What has taken the layer's place
    (an adapter around it, a quantised layer) has in its weight not all that it computes: it is asked instead, by
    mapping every unit vector.
    """
    weight = module.weight
    if weight.dim() == 3:
        return weight
    if type(module).forward is not nn.Linear.forward:
        inner = getattr(module, "in_features", weight.shape[-1])
        weight = module(torch.eye(inner, dtype=like.dtype, device=like.device)).T.contiguous()
    elif isinstance(weight, DTensor):
        weight = weight.to_local()
    return weight.unflatten(0, (-1, width))


def in_one_row(x: Tensor) -> bool:
    """Whether these are tokens one after another, [N, heads, width], outside training: what eager kernels take."""
    return x.dim() == 3 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
