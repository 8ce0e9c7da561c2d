"""How long are prompts, answers and pauses? Distributions that sample from a generator that is handed in."""

import bisect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol


class Lengths(Protocol):
    """A distribution of whole numbers of tokens."""

    def sample(self, rng: random.Random) -> int:
        """Draw one length."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def sample(self, rng: random.Random) -> int:
        """Return the length."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths with a long tail: ``median`` tokens, ``sigma`` the deviation of the logarithm, cut to [least, most]."""

    median: float
    sigma: float
    least: int = 1
    most: int = 1_000_000

    def sample(self, rng: random.Random) -> int:
        """Draw one length."""
        drawn = rng.lognormvariate(math.log(self.median), self.sigma)
        return max(self.least, min(self.most, round(drawn)))


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths as they were observed, each as often as its weight says."""

    values: Sequence[int]
    weights: Sequence[float] | None = None
    _steps: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("an empirical distribution needs at least one value")
        weights = [1.0] * len(self.values) if self.weights is None else list(self.weights)
        if len(weights) != len(self.values) or min(weights) < 0.0 or sum(weights) <= 0.0:
            raise ValueError("weights: one per value, none below 0, not all 0")
        object.__setattr__(self, "_steps", list(accumulate(weights)))

    @classmethod
    def of_histogram(cls, counts: Mapping[int, float]) -> "Empirical":
        """Take length -> count, in ascending order of length so that the same histogram draws the same lengths."""
        ordered = sorted(counts)
        return cls(ordered, [counts[value] for value in ordered])

    def sample(self, rng: random.Random) -> int:
        """Draw one length."""
        # uniform() may return the upper end by rounding: the last value then.
        place = bisect.bisect_right(self._steps, rng.uniform(0.0, self._steps[-1]))
        return self.values[min(place, len(self.values) - 1)]
