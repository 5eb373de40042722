"""Numbers with their uncertainty: means over seeds, and differences between rows paired by seed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95
FEWEST = 3  # seeds from which an interval is given: with two it would be nine times the spread either way
ALIKE = 1e-12  # a spread below it is rounding: seeds that agree exactly, as accuracies on few items may, show no noise


@dataclass(frozen=True)
class Estimate:
    """A quantity measured once per seed."""

    values: dict[int, float]  # by seed

    @property
    def n(self) -> int:
        return len(self.values)

    def over(self, seeds: Collection[int]) -> "Estimate":
        return Estimate({seed: value for seed, value in self.values.items() if seed in seeds})

    @property
    def mean(self) -> float:
        return math.fsum(self.values.values()) / self.n

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, from two seeds on."""
        if self.n < 2:
            return None
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values.values()) / (self.n - 1))

    @property
    def half_width(self) -> float | None:
        """Half of Student's 95% interval of the mean, from three seeds on, if they differ at all."""
        spread = self.spread
        if spread is None or self.n < FEWEST or spread < ALIKE:
            return None
        return student_quantile(0.5 + LEVEL / 2, self.n - 1) * spread / math.sqrt(self.n)

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def told_apart(self) -> bool | None:
        """For a difference: whether its interval leaves out zero; None where there is no interval."""
        interval = self.interval
        return None if interval is None else not interval[0] <= 0.0 <= interval[1]


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Ours minus theirs, seed by seed, over the seeds both have; None if they share none.

    Under one seed two rows see the same data in the same order and share the start of every common parameter, so
    what a seed does to both cancels.
    """
    shared = sorted(ours.keys() & theirs.keys())
    return Estimate({seed: ours[seed] - theirs[seed] for seed in shared}) if shared else None


@lru_cache
def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t, by bisection of its distribution."""
    low, high = 0.0, 1.0
    while _student_within(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return high


def _student_within(t: float, degrees: int) -> float:
    """The probability that |T| < t: a finite sum where the degrees of freedom are whole."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine, odd = math.sin(angle), math.cos(angle), degrees % 2
    term, total = cosine**odd, 0.0
    for k in range(2, degrees + 1 - odd, 2):
        total += term
        term *= cosine**2 * (k - 1 + odd) / (k + odd)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
