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
    """Season: the values of one period ago, shifted by the present difference.

    The period is the lag with the highest autocorrelation, once two such periods were observed.

    Args:
        longest: most bins that are remembered; periods up to half of it can be found.
        group: bins that are averaged into one before the search for periods.
    """

    LEAST = 0.5
    """Autocorrelation below which there is no period."""

    _values: list[float]
    period: int | None
    """In bins; None until one is found."""
    _next_search: int

    def __init__(self, longest: int = 12_000, group: int = 4) -> None:
        self.name = "seasonal"
        self.period = None
        self._longest = longest
        self._group = group
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
        if self.period is None or len(self._values) < self.period + max(steps):
            return None
        values = np.asarray(self._values[-2 * self.period - self._group :])
        last = len(values) - 1
        width = self._group
        now = float(values[-width:].mean())
        then = float(values[last - self.period - width + 1 : last - self.period + 1].mean())
        ahead = np.asarray(steps) % self.period
        places = last - self.period + np.where(ahead == 0, self.period, ahead)
        # Around each place, since single bins are noisy.
        smooth = np.convolve(values, np.ones(width) / width, mode="same")
        path: Floats = np.maximum(0.0, smooth[places] + (now - then))
        return path

    def _search(self) -> int | None:
        """Return the period with the highest autocorrelation, in bins. Cost: O(n log n)."""
        group = self._group
        count = len(self._values) // group
        if count < 16:
            return None
        values = np.asarray(self._values[-count * group :]).reshape(count, group).mean(axis=1)
        values -= values.mean()
        power = np.fft.rfft(values, 2 * count)
        auto = np.fft.irfft(power * np.conj(power))[:count]
        if auto[0] <= 1e-9:
            return None
        lags = np.arange(count)
        auto = auto / auto[0] * count / np.maximum(1, count - lags)
        # Up to the first descent a value resembles its neighbours; that is no period.
        below = np.flatnonzero(auto < 0.0)
        if not len(below):
            return None
        first, most = int(below[0]), count // 2
        if first >= most:
            return None
        best = first + int(np.argmax(auto[first : most + 1]))
        if auto[best] < self.LEAST or best >= most:
            return None
        return best * group


def usual() -> list[Expert]:
    """Return the default experts."""
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
        SeasonalExpert(),
    ]
