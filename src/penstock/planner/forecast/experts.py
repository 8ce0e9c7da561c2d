"""Which simple forecasts does the ensemble weigh? Level, damped trend, curve, and what was a period ago.

They work on the square root of a rate: there, the noise of counting is the same at any rate, so that one error of
theirs can be held against another at another time of day.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Expert(Protocol):
    """One way to go on from what was seen."""

    name: str

    def add(self, value: float) -> None:
        """Take in the value of the next bin."""
        ...

    def shift(self, by: float) -> None:
        """Everything is higher by so much from now on: a jump, which says nothing of how it goes on."""
        ...

    def path(self, steps: Sequence[int]) -> Floats | None:
        """Return the values expected so many bins ahead, shape (len(steps),); None where it can't tell yet."""
        ...

    def snapshot(self) -> Any:
        """Return the state as plain data."""
        ...

    def restore(self, state: Any) -> None:
        """Become what wrote ``state``."""
        ...


class Level:
    """It stays as it is: a mean that forgets with a time constant of ``bins``."""

    def __init__(self, bins: float) -> None:
        self.name = f"level-{bins:g}"
        self._gain = 1.0 / max(1.0, bins)
        self._level: float | None = None
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

    def snapshot(self) -> Any:
        return [self._level, self._count]

    def restore(self, state: Any) -> None:
        self._level, self._count = state


class Trend:
    """It goes on as it went, ever less: level and slope with damping (Gardner and McKenzie 1985).

    Args:
        level, slope: gains, 0..1; ``damping``: what is left of the slope from one bin to the next, 0..1.
    """

    def __init__(self, level: float, slope: float, damping: float) -> None:
        self.name = f"trend-{level:g}-{slope:g}-{damping:g}"
        self._gains = (level, slope, damping)
        self._level: float | None = None
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

    def snapshot(self) -> Any:
        return [self._level, self._slope, self._count]

    def restore(self, state: Any) -> None:
        self._level, self._slope, self._count = state


class Curve:
    """It bends on as it bent: a parabola through the last values, the newest weighing most.

    Curvature and slope are drawn towards none, so that noise is not continued; what was seen is exceeded by little.

    Args:
        memory: bins after which a value weighs a third of the newest.
    """

    SHRINK = (0.0, 0.5, 1.0)
    HIGHEST = 1.3
    """Times the highest value remembered."""

    def __init__(self, memory: int) -> None:
        self.name = f"curve-{memory}"
        self._memory = memory
        self._values: list[float] = []

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
        found: Floats = np.clip(np.vander(ahead, 3, increasing=True) @ bend, 0.0, self.HIGHEST * float(values.max()))
        return found

    def snapshot(self) -> Any:
        return list(self._values)

    def restore(self, state: Any) -> None:
        self._values = list(state)


class Seasonal:
    """It goes as it went one period ago, shifted by how much higher or lower it is now.

    The period is found in what was seen: the lag at which it is most like itself, once two such periods were seen.

    Args:
        longest: most bins that are remembered; periods up to half of it can be found.
        group: bins that are averaged into one before periods are looked for.
    """

    LEAST = 0.5
    """Autocorrelation below which there is no period."""

    def __init__(self, longest: int = 12_000, group: int = 4) -> None:
        self.name = "seasonal"
        self.period: int | None = None
        """In bins; None while none was found."""
        self._longest = longest
        self._group = group
        self._values: list[float] = []
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
        """Nothing: a jump is part of the season, or it is found in how much higher it is now than a period ago."""

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
        found: Floats = np.maximum(0.0, smooth[places] + (now - then))
        return found

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
        # The first descent is likeness to what was just before, not a period.
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

    def snapshot(self) -> Any:
        return {"values": list(self._values), "period": self.period, "next": self._next_search}

    def restore(self, state: Any) -> None:
        self._values, self.period, self._next_search = list(state["values"]), state["period"], state["next"]


def usual() -> list[Expert]:
    """Return the experts that are asked where nobody says otherwise."""
    return [
        Level(2),
        Level(10),
        Trend(0.4, 0.1, 0.95),
        Trend(0.3, 0.05, 0.98),
        Trend(0.15, 0.03, 0.99),
        Curve(12),
        Curve(30),
        Seasonal(),
    ]
