"""Warm-up of predictors: the requests of an earlier trace, counted in intervals."""

import math
from collections.abc import Iterable, Iterator

from penstock.kernel.values import RequestShape
from penstock.planner.forecast.predictor import IntervalCounts, IntervalShape
from penstock.planner.forecast.trace_interval import TraceInterval

INTERVALS_MAX = 100_000
"""Most intervals of one trace: more means that its times are not in seconds."""


def intervals(rows: Iterable[TraceInterval], width: float) -> Iterator[IntervalCounts]:
    """Yield the counts of each interval of ``width`` seconds, from the first arrival on; a gap has no requests.

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
        sums = counts.setdefault(math.floor(row.arrival / width), [0.0, 0.0, 0.0])
        for place, value in enumerate((1.0, row.shape.isl, row.shape.osl)):
            sums[place] += value
    if not counts:
        return
    first, last = min(counts), max(counts)
    if last - first >= INTERVALS_MAX:
        raise ValueError(f"{last - first} intervals of {width:g} s: are the times in seconds?")
    for place in range(first, last + 1):
        requests, prompts, outputs = counts.get(place, (0.0, 0.0, 0.0))
        each = requests or 1.0
        yield IntervalCounts(requests, RequestShape(prompts / each, outputs / each))


def warm_up(shape: IntervalShape, rows: Iterable[TraceInterval], width: float) -> int:
    """Feed a trace to predictors before any traffic; return the number of intervals."""
    count = 0
    for interval in intervals(rows, width):
        shape.add(interval.requests, interval.shape)
        count += 1
    shape.warmed_up()
    return count
