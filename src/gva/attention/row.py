"""What a token leaves in the cache: each attention declares it once; who stores, shards or counts it reads that."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """`heads` times `width` scalars. Over tensor-parallel ranks its heads are split; a `shared` part is on every rank,
    whole, and so is a head that there are too few of."""

    heads: int
    width: int
    shared: bool = False

    @property
    def size(self) -> int:
        return self.heads * self.width

    def over(self, ranks: int) -> "Part":
        """What one of `ranks` holds of it, the fullest where they cannot be alike."""
        return self if self.shared else replace(self, heads=-(-self.heads // ranks))


@dataclass(frozen=True)
class Row:
    """One token of one layer: its content, which fp8 rounds, and one rotated key for all heads, which it does not.

    content  the values of all groups, or a latent, and keys where they are cached: [keys, values]
    rope     k_rope, for attentions whose position is decoupled; its tensors have no dimension of heads
    """

    content: tuple[Part, ...]
    rope: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.content if self.rope is None else (*self.content, self.rope)

    @property
    def scalars(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def packs(self) -> bool:
        """Whether a token is one state and one slice: what our kernels read, and what the packed fp8 row holds."""
        return self.rope is not None and len(self.content) == 1

    @property
    def has_keys(self) -> bool:
        """Whether keys and values are both cached: attended to as they lie."""
        return len(self.content) == 2

    def over(self, ranks: int) -> "Row":
        """What one of `ranks` holds."""
        rope = None if self.rope is None else self.rope.over(ranks)
        return Row(tuple(part.over(ranks) for part in self.content), rope)
