"""Length distributions of prompts, answers and pauses, sampled from a generator that is handed in."""

import bisect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import Knob
from penstock_lab.traffic import inline_spec
from penstock_lab.traffic.lognormal_length import lognormal_length

Drawn = npt.NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of whole numbers of tokens."""

    def sample(self, rng: random.Random) -> int:
        """Draw one length."""
        ...

    def samples(self, rng: np.random.Generator, count: int) -> Drawn:
        """Draw so many lengths, each as `sample` draws one, at a fraction of the cost of each; shape (count,)."""
        ...


class Fixed(msgspec.Struct, frozen=True):
    """Always the same length."""

    tokens: Annotated[int, Knob("The length.", unit="tokens", ge=1)]

    def sample(self, rng: random.Random) -> int:
        """Return the length."""
        return self.tokens

    def samples(self, rng: np.random.Generator, count: int) -> Drawn:
        """Return the length so many times."""
        return np.full(count, self.tokens, dtype=np.int64)


class Lognormal(msgspec.Struct, frozen=True):
    """Lengths with a long tail, cut to [least, most]."""

    median: Annotated[float, Knob("Half of the lengths are above it.", unit="tokens", gt=0)]
    sigma: Annotated[float, Knob("Deviation of the length's logarithm; more has a longer tail.", ge=0)]
    least: Annotated[int, Knob("Shortest length.", unit="tokens", ge=1)] = 1
    most: Annotated[int, Knob("Longest length.", unit="tokens", ge=1)] = 1_000_000

    def sample(self, rng: random.Random) -> int:
        """Draw one length."""
        return lognormal_length(rng, self.median, self.sigma, self.least, self.most)

    def samples(self, rng: np.random.Generator, count: int) -> Drawn:
        """Draw so many lengths."""
        drawn = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))
        return np.clip(drawn, self.least, self.most).astype(np.int64)


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

    def samples(self, rng: np.random.Generator, count: int) -> Drawn:
        """Draw so many lengths."""
        places = np.searchsorted(self._steps, rng.uniform(0.0, self._steps[-1], count), side="right")
        return np.asarray(self.values, dtype=np.int64)[np.minimum(places, len(self.values) - 1)]


def parse_lengths(text: str, number: inline_spec.ReadNumber, *, what: str) -> Lengths:
    """Read lengths such as ``512`` or ``lognormal:median=800,sigma=0.5,most=8k``.

    Args:
        number: reads a number with a unit, as `penstock.config.reading.units.parse_number` does.
        what: the option that the text is the value of, for errors.

    Raises:
        ConfigError: names the setting, its value and what would be right.
    """
    if text.strip()[:1].isdigit():
        text = f"fixed:tokens={text.strip()}"
    lengths = inline_spec.parse(what, text, _KINDS, number)
    if isinstance(lengths, Lognormal) and lengths.least > lengths.most:
        raise ConfigError(f"{what} {text!r}: least={lengths.least} is above most={lengths.most}", hint="swap them")
    return lengths


_KINDS: dict[str, type[Fixed | Lognormal]] = {"fixed": Fixed, "lognormal": Lognormal}
