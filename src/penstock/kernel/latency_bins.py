"""Latency histograms in little memory: values are counted in bins that are 2 % wide, and counts add up."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

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
    """Return the value at each rank, ascending, 0..1; None for each where nothing was counted.

    A rank between two values takes the one nearer to it.
    """
    ordered = sorted(bins.items())
    total = sum(number for _, number in ordered)
    if not total:
        return [None for _ in wanted]
    found: list[float | None] = []
    at, seen = 0, ordered[0][1]
    for rank in wanted:
        place = round(rank * (total - 1))
        while seen <= place:
            at += 1
            seen += ordered[at][1]
        found.append(WIDTH ** ordered[at][0])
    return found
