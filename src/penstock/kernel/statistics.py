"""Percentiles and a line fit with exponential forgetting, without a library."""

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile (0..1) of an ascending sequence, linear between ranks: what every page and table shows.

    Raises:
        ValueError: the sequence is empty (an absent number is not 0).
    """
    if not ordered:
        raise ValueError("no values: a percentile of nothing is unknown, not 0")
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def weighted_percentile(ordered: Sequence[tuple[float, int]], q: float) -> float:
    """Return the `percentile` of ascending (value, count) pairs: that of the values written out count times.

    Raises:
        ValueError: no value (an absent number is not 0).
    """
    total = sum(count for _, count in ordered)
    if not total:
        raise ValueError("no values: a percentile of nothing is unknown, not 0")
    position = q * (total - 1)
    low = int(position)
    share = position - low
    seen = 0
    below: float | None = None
    for value, count in ordered:
        seen += count
        if below is None and seen > low:
            if share == 0.0 or seen > low + 1:
                return value
            below = value
        elif below is not None and seen > low + 1:
            return below + (value - below) * share
    return ordered[-1][0] if below is None else below


class LineFit:
    """Fit ``y = intercept + slope * x`` on line with exponential forgetting.

    Args:
        memory: how many recent points carry most of the weight.
    Source: weighted least squares with decayed sums.
    """

    __slots__ = ("_decay", "count", "n", "sx", "sxx", "sxy", "sy")

    def __init__(self, memory: float = 256.0) -> None:
        self._decay = 1.0 - 1.0 / memory
        self.count = 0
        self.n = self.sx = self.sy = self.sxx = self.sxy = 0.0

    def add(self, x: float, y: float) -> None:
        """Take one point in."""
        d = self._decay
        self.count += 1
        self.n = self.n * d + 1.0
        self.sx = self.sx * d + x
        self.sy = self.sy * d + y
        self.sxx = self.sxx * d + x * x
        self.sxy = self.sxy * d + x * y

    def line(self) -> tuple[float, float] | None:
        """Return (intercept, slope), neither below 0, or None while fewer than 8 points or no spread in x."""
        if self.count < 8:
            return None
        spread = self.n * self.sxx - self.sx * self.sx
        if spread <= 1e-9 * max(self.n * self.sxx, 1e-30):
            return None
        slope = max(0.0, (self.n * self.sxy - self.sx * self.sy) / spread)
        intercept = max(0.0, (self.sy - slope * self.sx) / self.n)
        return intercept, slope

    def snapshot(self) -> list[float]:
        """Return the state as plain numbers."""
        return [self._decay, self.count, self.n, self.sx, self.sy, self.sxx, self.sxy]

    def restore(self, state: Sequence[float]) -> None:
        """Become the fit that `snapshot` wrote."""
        self._decay, count, self.n, self.sx, self.sy, self.sxx, self.sxy = state
        self.count = int(count)
