"""Simple forecasts that the ensemble mixes: level, damped trend, curve, and season.

They work on the square root of a rate: there the noise of counting is the same at any rate, so that an error can
be compared with one at another time of day.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.planner.remembering import Remembering

Floats = npt.NDArray[np.float64]


BEAT_BASES = (40, 160)
"""Bins over which a beat's base is taken: ten and forty minutes of bins of 15 s, for beats of minutes to hours."""


class Expert(Protocol):
    """One way to extrapolate the observed values."""

    name: str

    def add(self, value: float) -> None:
        """Add the value of the next bin."""
        ...

    def shift(self, by: float) -> None:
        """Shift everything up by so much: a jump, which means nothing for the slope."""
        ...

    def path(self, steps: Sequence[int]) -> Floats | None:
        """Return the values expected so many bins ahead, shape (len(steps),); None where it has too few values."""
        ...

    def snapshot(self) -> Any:
        """Return the state as plain data."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state that `snapshot` wrote."""
        ...


class LevelExpert(Remembering):
    """Level: a mean that forgets with a time constant of ``bins``."""

    _level: float | None
    _count: int

    def __init__(self, bins: float) -> None:
        self.name = f"level-{bins:g}"
        self._gain = 1.0 / max(1.0, bins)
        self._level = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        # A plain mean at first, so that the first value does not weigh for ever.
        gain = max(self._gain, 1.0 / self._count)
        self._level = value if self._level is None else self._level + gain * (value - self._level)

    def shift(self, by: float) -> None:
        if self._level is not None:
            self._level = max(0.0, self._level + by)

    def path(self, steps: Sequence[int]) -> Floats | None:
        return None if self._level is None else np.full(len(steps), self._level)


class TrendExpert(Remembering):
    """Damped trend: level and slope, the slope fading (Gardner and McKenzie 1985).

    Args:
        level, slope: gains, 0..1; ``damping``: share of the slope left from one bin to the next, 0..1.
    """

    _level: float | None
    _slope: float
    _count: int

    def __init__(self, level: float, slope: float, damping: float) -> None:
        self.name = f"trend-{level:g}-{slope:g}-{damping:g}"
        self._gains = (level, slope, damping)
        self._level = None
        self._slope = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        level, slope, damping = self._gains
        self._count += 1
        if self._level is None:
            self._level = value
            return
        before = self._level
        expected = before + damping * self._slope
        gain = max(level, 1.0 / self._count)
        self._level = expected + gain * (value - expected)
        self._slope = damping * self._slope + slope * (self._level - before - damping * self._slope)

    def shift(self, by: float) -> None:
        if self._level is not None:
            self._level = max(0.0, self._level + by)

    def path(self, steps: Sequence[int]) -> Floats | None:
        if self._level is None or self._count < 4:
            return None
        damping = self._gains[2]
        ahead = np.asarray(steps, dtype=np.float64)
        reach = ahead if damping == 1.0 else damping * (1.0 - damping**ahead) / (1.0 - damping)
        return np.maximum(0.0, self._level + self._slope * reach)


class CurveExpert(Remembering):
    """Curve: a parabola through the last values, the newest weighing most.

    Curvature and slope are shrunk towards zero, so that noise is not continued; it exceeds past values by little.

    Args:
        memory: bins after which a value weighs a third of the newest.
    """

    SHRINK = (0.0, 0.5, 1.0)
    HIGHEST = 1.3
    """Limit, as a factor on the highest value remembered."""

    _values: list[float]

    def __init__(self, memory: int) -> None:
        self.name = f"curve-{memory}"
        self._memory = memory
        self._values = []

    def add(self, value: float) -> None:
        self._values.append(value)
        del self._values[: -4 * self._memory]

    def shift(self, by: float) -> None:
        self._values = [max(0.0, value + by) for value in self._values]

    def path(self, steps: Sequence[int]) -> Floats | None:
        count = len(self._values)
        if count < 6:
            return None
        values = np.asarray(self._values)
        back = np.arange(1 - count, 1, dtype=np.float64) / self._memory
        powers = np.vander(back, 3, increasing=True)
        weighted = powers * np.exp(back)[:, None]
        bend = np.linalg.solve(weighted.T @ powers + np.diag(self.SHRINK), weighted.T @ values)
        ahead = np.asarray(steps, dtype=np.float64) / self._memory
        path: Floats = np.clip(np.vander(ahead, 3, increasing=True) @ bend, 0.0, self.HIGHEST * float(values.max()))
        return path


class SeasonalExpert(Remembering):
    """Season: what followed the same moment of the last periods, shifted by the present difference of their means.

    The period is the shortest lag at which the values resemble themselves about as much as at any, once two such
    periods were observed.

    Args:
        name: of the expert.
        longest: most bins that are remembered; periods up to half of it can be found.
        group: bins that are averaged into one before the search; the period is then found to the bin.
        bases: bins over which a mean is taken away before the search, so that a slow wave does not hide a beat on it;
            0 searches the values as they are.
    """

    LEAST = 0.5
    """Autocorrelation below which there is no period..."""
    NEAR = 0.75
    """... and share of the highest from which a shorter lag is one."""
    PERIODS = 3
    """Periods whose values are averaged, where there are so many."""

    BEND = 0.7
    """Share of a base's curvature that is continued."""

    _values: list[float]
    period: int | None
    """In bins; None until one is found."""
    _next_search: int

    def __init__(
        self, name: str = "seasonal", longest: int = 12_000, group: int = 4, bases: Sequence[int] = (0,)
    ) -> None:
        self.name = name
        self.period = None
        self._longest = longest
        self._group = group
        self._bases = tuple(bases)
        self._values = []
        self._next_search = 8 * group

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) > self._longest:
            del self._values[: self._longest // 8]
        self._next_search -= 1
        if self._next_search <= 0:
            self.period = self._search()
            self._next_search = max(4 * self._group, len(self._values) // 32)

    def shift(self, by: float) -> None:
        """Do nothing: a jump is part of the season, or it shows in the difference from a period ago."""

    def path(self, steps: Sequence[int]) -> Floats | None:
        period = self.period
        if period is None or len(self._values) < 2 * period:
            return None
        known = min(self.PERIODS, len(self._values) // period)
        past = np.asarray(self._values[-known * period :]).reshape(known, period)[::-1]  # the newest period comes first
        means = past.mean(axis=1)
        slope = means[0] - means[1]  # per period, as everywhere here
        bend = self.BEND * (slope - (means[1] - means[2])) if known > 2 else 0.0
        ahead = np.asarray(steps) - 1
        # What the season lies on, as a parabola through the means, each of which is that of its period's middle.
        later = (ahead + 1) / period
        base = self._base_at(later, slope, bend)
        following = []
        for row in range(known):
            then = later - 1.0 - row
            following.append(past[row][ahead % period] + base - self._base_at(then, slope, bend))
        path: Floats = np.maximum(0.0, np.mean(following, axis=0))
        return path

    @staticmethod
    def _base_at(places: Floats, slope: float, bend: float) -> Floats:
        """Return the base beside that of half a period ago; ``places``: periods from now."""
        from_middle = places + 0.5
        return from_middle * slope + 0.5 * from_middle * (from_middle + 1.0) * bend

    def _search(self) -> int | None:
        """Return the period in bins. Cost: O(n log n)."""
        group = self._group
        count = len(self._values) // group
        if count < 16:
            return None
        values = np.asarray(self._values[-count * group :])
        found = [self._period_in(values - _around(values, base) if base else values) for base in self._bases]
        score, period = max(found)
        return period if score >= self.LEAST else None

    def _period_in(self, values: Floats) -> tuple[float, int]:
        """Return the autocorrelation at the period, and the period in bins; 0.0 where there is none."""
        group, count = self._group, len(values) // self._group
        coarse = _autocorrelation(values.reshape(count, group).mean(axis=1), count // 2)
        # Up to the first descent a value resembles its neighbours; that is no period.
        below = np.flatnonzero(coarse < 0.0)
        if not len(below):
            return 0.0, 0
        first = int(below[0])
        best = first + int(np.argmax(coarse[first:]))
        if best >= count // 2:
            return 0.0, 0
        score = float(coarse[best])
        near = first + np.flatnonzero(coarse[first:best] >= self.NEAR * coarse[best])
        lag = int(near[0]) if len(near) else best
        while lag + 1 < len(coarse) and coarse[lag + 1] > coarse[lag]:
            lag += 1
        fine = _autocorrelation(values, min(len(values) // 2, (lag + 1) * group))
        lowest = max(1, (lag - 1) * group)
        return score, lowest + int(np.argmax(fine[lowest:]))


def _around(values: Floats, width: int) -> Floats:
    """Return the mean of so many values around each; of fewer at both ends."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    places = np.arange(len(values))
    begin, end = np.maximum(0, places - width // 2), np.minimum(len(values), places + width // 2 + 1)
    means: Floats = (total[end] - total[begin]) / (end - begin)
    return means


def _autocorrelation(values: Floats, most: int) -> Floats:
    """Return the autocorrelation at lags up to ``most``; zeros where nothing moves."""
    count = len(values)
    centred = values - values.mean()
    power = np.fft.rfft(centred, 2 * count)
    auto = np.fft.irfft(power * np.conj(power))[: most + 1]
    if auto[0] <= 1e-9:
        return np.zeros(most + 1)
    scaled: Floats = auto / auto[0] * count / (count - np.arange(most + 1))
    return scaled


def usual(group: int = 4) -> list[Expert]:
    """Return the default experts; ``group``: as those have it that look for periods."""
    return [
        LevelExpert(1),
        LevelExpert(2),
        LevelExpert(10),
        LevelExpert(40),
        TrendExpert(0.4, 0.1, 0.95),
        TrendExpert(0.3, 0.05, 0.98),
        TrendExpert(0.15, 0.03, 0.99),
        CurveExpert(12),
        CurveExpert(30),
        SeasonalExpert(group=group),
        SeasonalExpert("beat", group=group, bases=BEAT_BASES),
    ]
