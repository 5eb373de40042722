"""Which documents are held out for validation: by their content, so that copies of one never stand on both sides."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

HOLD_OUT = 100  # usually about one document in so many
SHARE = 10  # of few documents, one part in so many of their text, as near as can be


@dataclass(frozen=True)
class HoldOut:
    """Documents whose number, made of their content, leaves `remainder` when divided by `one_in`; of each document its
    last part, where there is but one."""

    one_in: int = HOLD_OUT
    remainder: int = 0
    tails: bool = False

    def sides(self, text: str) -> Iterator[tuple[str, str]]:
        """The document with its split; cut in two where ends of documents are held out."""
        if not self.tails:
            yield ("valid" if number_of(text) % self.one_in == self.remainder else "train"), text
            return
        end = _late_break(text)
        yield from ((split, part) for split, part in (("train", text[:end]), ("valid", text[end:])) if part)

    def noted(self) -> Any:
        """What a shard's record says of it."""
        if self.tails:
            return "the end of each document"
        return [self.one_in, self.remainder] if self.remainder else self.one_in


def choose(texts: Iterable[str], one_in: int = HOLD_OUT) -> HoldOut:
    """The usual one document in so many, if that is something, and something is left; else the choice that comes
    nearest to a tenth of the text. Reads no further than it must, and raises LookupError if there is no text."""
    sizes: dict[int, int] = {}
    held = left = 0
    for text in texts:
        number, size = number_of(text), len(text.encode())
        sizes[number] = sizes.get(number, 0) + size
        if number % one_in == 0:
            held += size
        else:
            left += size
        if held and left:
            return HoldOut(one_in)
    total = held + left
    if not total:
        raise LookupError("no text")
    shares: Counter[tuple[int, int]] = Counter()
    for number, size in sizes.items():
        for divisor in (SHARE, 2**32):
            shares[divisor, number % divisor] += size
    possible = [rule for rule, share in shares.items() if 0 < share < total]
    if not possible:
        return HoldOut(tails=True)
    return HoldOut(*min(sorted(possible), key=lambda rule: abs(shares[rule] - total / SHARE)))


def is_held_out(text: str, one_in: int) -> bool:
    return number_of(text) % one_in == 0


def number_of(text: str) -> int:
    return zlib.crc32(text.encode())


def _late_break(text: str) -> int:
    """Where the last tenth of a text begins: after a blank line, else a line, else a word, if there is one in time."""
    late = max(1, len(text) * (SHARE - 1) // SHARE)
    places = (text.find(mark, late) + len(mark) for mark in ("\n\n", "\n", " ") if mark in text[late:])
    return next((place for place in places if place < len(text)), late)
