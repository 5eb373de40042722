"""What an attention's config derives and refuses, wherever it is a config of: a whole model (`gva.config.GvaConfig`) or
one layer (`gva.nn`). Loads torch alone.

Symbols: H = num_attention_heads, G = num_value_groups, d_h = value_head_dim, d_r = rope_dim, d_n the width of a
content key.
"""

from typing import Any

from gva.attention import Row, choices, class_of, names
from gva.errors import check, check_choice

# Fields that one attention alone has a use for, and what to say to others.
_OPTIONAL = {
    "map_init": "only attention='gva' has maps to initialise",
    "latent_dim": "only attention='mla' has a latent",
}


class Shape:
    """Mixed into a class with the fields of GvaConfig's attention: `_resolve_attention` fills in those left at None."""

    attention: Any
    positional: Any
    hidden_size: Any
    num_attention_heads: Any
    num_value_groups: Any
    value_head_dim: Any
    rope_dim: Any
    rope_allocation: Any
    score_scale: Any
    latent_norm: Any

    def _resolve_attention(self) -> None:
        check_choice("attention", self.attention, names())
        H = self.num_attention_heads
        if self.value_head_dim is None:
            check(
                self.hidden_size % H == 0,
                "hidden_size",
                self.hidden_size,
                f"must be divisible by num_attention_heads={H} unless value_head_dim is given",
            )
            self.value_head_dim = self.hidden_size // H
        classes = choices(self.attention)
        fixed = classes[0].fixed_groups(H)
        if self.num_value_groups is None:
            self.num_value_groups = fixed or max(1, H // 4)
        G = self.num_value_groups
        check(H % G == 0, "num_value_groups", G, f"must divide num_attention_heads={H}")
        if fixed is not None:
            what = "one group" if fixed == 1 else "one group per head"
            check(fixed == G, "num_value_groups", G, f"{self.attention} has {what}: must be {fixed}")
        allowed = [known.positional for known in classes]
        self.positional = allowed[0] if self.positional is None else self.positional
        check_choice("positional", self.positional, allowed, f"attention={self.attention!r}")
        chosen = class_of(self)
        for name, why in _OPTIONAL.items():
            if name not in chosen.fields:
                self._refuse(name, why)
        latent = "latent_dim" in chosen.fields
        check(self.latent_norm or latent, "latent_norm", self.latent_norm, _OPTIONAL["latent_dim"])
        chosen.settle(self)
        self._resolve_slice(chosen.allocations)

    def _resolve_slice(self, allocations: tuple[str, ...]) -> None:
        d_h = self.value_head_dim
        if self.positional == "rope":
            why = f"only positional='decoupled' has a slice (attention={self.attention!r} has 'rope')"
            self._refuse("rope_dim", why)
            self._refuse("rope_allocation", why)
            check(d_h % 2 == 0, "value_head_dim", d_h, "must be even, because the whole head is rotated")
            return
        self.rope_dim = 16 if self.rope_dim is None else self.rope_dim
        check(self.rope_dim % 2 == 0, "rope_dim", self.rope_dim, "must be even: RoPE rotates pairs")
        beside = self.rope_dim >= d_h and "additive" in allocations
        self.rope_allocation = self.rope_allocation or ("additive" if beside else "carved")
        check_choice("rope_allocation", self.rope_allocation, allocations, f"attention={self.attention!r}")
        if self.rope_allocation == "carved":
            check(
                self.rope_dim < d_h,
                "rope_dim",
                self.rope_dim,
                f"a carved slice must be smaller than value_head_dim={d_h}; use rope_allocation='additive'",
            )

    def _refuse(self, name: str, why: str) -> None:
        value = getattr(self, name)
        check(value is None, name, value, why)

    # ---- derived widths ----

    @property
    def head_dim(self) -> int | None:
        """The width of a head that is rotated as a whole, for those who look for it by this name; else None."""
        return self.value_head_dim if self.positional == "rope" else None

    @property
    def content_dim(self) -> int:
        """d_n: the width of a content key; the whole head where nothing is decoupled."""
        if self.positional == "rope" or self.rope_allocation == "additive":
            return self.value_head_dim
        return self.value_head_dim - (self.rope_dim or 0)

    @property
    def score_dim(self) -> int:
        """d_qk = d_n + d_r: the width of a query head; scores are scaled by its square root."""
        return self.content_dim + (self.rope_dim or 0)

    @property
    def scaling(self) -> float:
        """What scores are multiplied by, in both forms."""
        return self.score_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def rotated_dim(self) -> int:
        """How many dimensions of a head RoPE turns."""
        return self.rope_dim or self.value_head_dim

    @property
    def row(self) -> Row:
        """What is cached of a token in each layer that `layers` leaves alone."""
        return class_of(self).row(self)

    @property
    def absorbs(self) -> bool:
        """Whether the key map can be moved into the query, so that decoding needs no content key."""
        return class_of(self).absorbs

    @property
    def rotates_late(self) -> bool:
        """Whether the cache is V alone, keys being rebuilt and rotated at each step."""
        return class_of(self).rotates_late
