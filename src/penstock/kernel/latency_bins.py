"""Latency histograms in little memory: values are counted in bins that are 2 % wide, and counts add up."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from penstock.kernel.statistics import weighted_percentile

K = TypeVar("K")

Bins = dict[int, int]
"""Bin -> how many values; bin b stands for `WIDTH` ** b seconds."""

WIDTH = 1.02
"""Upper over lower end of a bin: a reported value is at most 1 % off."""
LEAST = 1e-6
"""Seconds below which values are reported as this."""
_SCALE = 1.0 / math.log(WIDTH)


def count(bins: Bins, seconds: float) -> None:
    """Count one value."""
    place = round(math.log(seconds if seconds > LEAST else LEAST) * _SCALE)
    bins[place] = bins.get(place, 0) + 1


def join(bins: dict[K, int], other: Mapping[K, int]) -> None:
    """Add the counts of ``other``."""
    for place, number in other.items():
        bins[place] = bins.get(place, 0) + number


def quantiles(bins: Mapping[int, int], wanted: Iterable[float]) -> list[float | None]:
    """Return the value at each rank, 0..1; None for each where nothing was counted."""
    pairs = [(WIDTH**place, number) for place, number in sorted(bins.items()) if number]
    return [weighted_percentile(pairs, rank) if pairs else None for rank in wanted]
