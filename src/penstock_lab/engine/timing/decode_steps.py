"""Durations of many decode steps together: closed forms where a step's time is a curve, else one array.

Durations are nanoseconds from the start of the run.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class DecodeSteps:
    """A run of equal decode steps: the same sequences, each one token longer from step to step.

    A class, not a Protocol: compiled code calls its methods directly, seven times for each request.
    """

    __slots__ = ()

    def after(self, steps: int) -> int:
        """Return the nanoseconds that the first ``steps`` steps take together."""
        raise NotImplementedError

    def within(self, duration: int) -> int:
        """Return how many steps are over after ``duration`` nanoseconds, at most the length of the run."""
        raise NotImplementedError


class QuadraticSteps(DecodeSteps):
    """A run whose step i takes ``a + b*i + c*i*i`` up to step ``bend`` and ``flat`` from there on: a closed form."""

    __slots__ = ("_a", "_b", "_bend", "_c", "_flat", "_steps")

    def __init__(self, a: float, b: float, c: float, bend: int, steps: int, flat: float = 0.0) -> None:
        self._a, self._b, self._c = a, b, c
        self._bend, self._steps, self._flat = bend, steps, flat

    def after(self, steps: int) -> int:
        n = steps if steps < self._bend else self._bend
        total = n * (self._a + (n - 1) * (self._b * 0.5 + self._c * (2 * n - 1) / 6.0))
        return round(total + (steps - n) * self._flat)

    def within(self, duration: int) -> int:
        # Steps differ little from each other, so a secant lands within a step or two of the answer.
        low, high = 0, self._steps  # after(low) <= duration < after(high + 1)
        end = self.after(high)
        if end <= duration:
            return high
        start = 0
        while high - low > 1:
            guess = low + int((duration - start) * (high - low) / (end - start))
            guess = min(max(guess, low + 1), high - 1)
            at = self.after(guess)
            if at <= duration:
                low, start = guess, at
                step = guess + 1
                if step < high:  # the secant comes from below on a rising curve: close the other side, too
                    at = self.after(step)
                    if at > duration:
                        return guess
                    low, start = step, at
            else:
                high, end = guess, at
        return low


class PiecewiseSteps(DecodeSteps):
    """Two runs, the second after step ``bend`` of the first."""

    __slots__ = ("_at", "_bend", "_first", "_second")

    def __init__(self, first: DecodeSteps, bend: int, second: DecodeSteps) -> None:
        self._first, self._bend, self._second = first, bend, second
        self._at = first.after(bend)

    def after(self, steps: int) -> int:
        if steps <= self._bend:
            return self._first.after(steps)
        return self._at + self._second.after(steps - self._bend)

    def within(self, duration: int) -> int:
        if duration < self._at:
            return self._first.within(duration)
        return self._bend + self._second.within(duration - self._at)


class TabulatedSteps(DecodeSteps):
    """A run whose steps were worked out one by one, all at once: ``ends[i]`` is when step i is over."""

    __slots__ = ("_ends",)

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends

    @classmethod
    def of(cls, steps: Array) -> "TabulatedSteps":
        """Return the run of steps that take so many nanoseconds each."""
        return cls(np.rint(np.cumsum(steps)).astype(np.int64).tolist())

    def after(self, steps: int) -> int:
        return self._ends[steps - 1] if steps else 0

    def within(self, duration: int) -> int:
        return bisect_right(self._ends, duration)
