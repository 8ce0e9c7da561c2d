"""What did an earlier day look like? A trace's requests in intervals, for predictors to begin with."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.planner.forecast.base import Interval, Shape

INTERVALS_MAX = 100_000
"""Intervals of one trace: more means that its times are not in seconds."""


class Row(NamedTuple):
    """One request of a trace. ``arrival``: seconds; ``isl``, ``osl``: tokens."""

    arrival: float
    isl: float
    osl: float


def intervals(rows: Iterable[Row], width: float) -> Iterator[Interval]:
    """Yield what each interval of ``width`` seconds had, from the first arrival on; a gap is one without requests.

    Args:
        rows: in any order.
    Raises:
        ValueError: there would be too many intervals, or a time is no number.
    """
    if width <= 0.0:
        raise ValueError(f"an interval of {width} s")
    counts: dict[int, list[float]] = {}
    for row in rows:
        if not math.isfinite(row.arrival):
            raise ValueError(f"an arrival at {row.arrival}")
        found = counts.setdefault(math.floor(row.arrival / width), [0.0, 0.0, 0.0])
        for place, value in enumerate((1.0, row.isl, row.osl)):
            found[place] += value
    if not counts:
        return
    first, last = min(counts), max(counts)
    if last - first >= INTERVALS_MAX:
        raise ValueError(f"{last - first} intervals of {width:g} s: are the times in seconds?")
    for place in range(first, last + 1):
        requests, prompts, outputs = counts.get(place, (0.0, 0.0, 0.0))
        yield Interval(requests, prompts / requests, outputs / requests) if requests else Interval(0.0, 0.0, 0.0)


def warm_up(shape: Shape, rows: Iterable[Row], width: float) -> int:
    """Let predictors see a trace before they see traffic; return how many intervals that were."""
    count = 0
    for seen in intervals(rows, width):
        shape.add(seen)
        count += 1
    shape.warmed_up()
    return count
