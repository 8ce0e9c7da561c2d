"""Rate profiles: shapes of an arrival rate over time, and arrivals that follow them exactly.

A shape says by what factor the mean rate is multiplied at each second, and how many arrivals are expected until then
at a mean rate of 1. Arrivals are one stream of gaps of mean 1 whose time runs as fast as the rate is high: gap by gap
the next arrival comes when that many more were expected. The first gap is drawn as an observer at any time would find
it, so the number of arrivals until t is, on average, exactly what is expected until t.
"""

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

FOREVER = 1e12
"""Seconds after which an arrival never comes: a rate fell to 0 for good."""
_CLOSE = 1e-9
"""Seconds within which a time is found: the clock's nanosecond."""

DAY, WEEK = 86_400.0, 7 * 86_400.0


class RateProfile(Protocol):
    """A rate over time, in units of a mean rate."""

    def factor(self, at: float) -> float:
        """Return the rate at second ``at``, from 0 on."""
        ...

    def expected(self, at: float) -> float:
        """Return the arrivals until second ``at``: the integral of `factor` from 0."""
        ...


class PiecewiseProfile:
    """A rate that is level from each start to the next; the last level stays, or all begin anew after ``period``.

    Args:
        starts: seconds, ascending, the first one 0.
        levels: factor from each start on.
        period: seconds, above the last start.
    """

    def __init__(self, starts: Sequence[float], levels: Sequence[float], period: float | None = None) -> None:
        ends = list(starts) if period is None else [*starts, period]
        if not starts or starts[0] != 0.0 or len(starts) != len(levels):
            raise ValueError("levels: one per start, the first start 0")
        if any(not before < after for before, after in pairwise(ends)) or min(levels) < 0.0:
            raise ValueError("starts (and the period) ascend, and no level is below 0")
        self._starts = list(starts)
        self._levels = list(levels)
        self._period = period
        widths = [after - before for before, after in pairwise(ends)]
        self._sums = [0.0, *accumulate(width * level for width, level in zip(widths, levels, strict=False))]

    def factor(self, at: float) -> float:
        """Return the level at second ``at``."""
        if self._period is not None:
            at %= self._period
        return self._levels[bisect.bisect_right(self._starts, at) - 1]

    def expected(self, at: float) -> float:
        """Return the integral of the levels from 0 to ``at``."""
        before = 0.0
        if self._period is not None:
            periods, at = divmod(at, self._period)
            before = periods * self._sums[-1]
        place = bisect.bisect_right(self._starts, at) - 1
        return before + self._sums[place] + (at - self._starts[place]) * self._levels[place]


class SineProfile:
    """A rate that swings by ``amplitude`` (0..1 of its mean) around its mean, one wave per ``period`` seconds.

    Args:
        start: where on the wave second 0 lies: 0 is the mean on its way up, 0.75 the trough.
    """

    def __init__(self, amplitude: float, period: float, start: float = 0.0) -> None:
        self._amplitude = amplitude
        self._turn = 2.0 * math.pi / period
        self._phase = 2.0 * math.pi * start

    def factor(self, at: float) -> float:
        """Return the rate at second ``at``."""
        return 1.0 + self._amplitude * math.sin(self._turn * at + self._phase)

    def expected(self, at: float) -> float:
        """Return the integral of `factor` from 0 to ``at``."""
        return at + self._amplitude * (math.cos(self._phase) - math.cos(self._turn * at + self._phase)) / self._turn


class SlopeProfile:
    """A rate that goes evenly from ``first`` to ``last`` within ``over`` seconds, and stays there."""

    def __init__(self, first: float, last: float, over: float) -> None:
        self._first, self._last, self._over = first, last, over

    def factor(self, at: float) -> float:
        """Return the rate at second ``at``."""
        return self._first + (self._last - self._first) * min(1.0, at / self._over)

    def expected(self, at: float) -> float:
        """Return the integral of `factor` from 0 to ``at``."""
        on = min(at, self._over)
        rising = on * (self._first + (self._last - self._first) * on / (2.0 * self._over))
        return rising + (at - on) * self._last


class WeeklyProfile:
    """A rate with a wave per day and quieter weekends, whose mean over a week is 1.

    Args:
        peak: second of the day at which the rate is highest.
        trough: rate at the quietest second of a day over that at its peak, 0..1.
        weekend: rate of a Saturday or a Sunday over that of another day.
        start: second of the week, from Monday midnight, at which second 0 lies.
    """

    def __init__(self, peak: float, trough: float, weekend: float, start: float) -> None:
        levels = [1.0] * 5 + [weekend] * 2
        mean = sum(levels) / 7
        self._levels = PiecewiseProfile([DAY * day for day in range(7)], [level / mean for level in levels], WEEK)
        self._wave = (1.0 - trough) / (1.0 + trough)
        self._peak = peak
        self._start = start
        self._before = self._since_monday(start)

    def factor(self, at: float) -> float:
        """Return the rate at second ``at``."""
        at += self._start
        return self._levels.factor(at) * (1.0 + self._wave * math.cos(2.0 * math.pi * (at - self._peak) / DAY))

    def expected(self, at: float) -> float:
        """Return the integral of `factor` from 0 to ``at``."""
        return self._since_monday(self._start + at) - self._before

    def _since_monday(self, at: float) -> float:
        # Over each whole day the wave adds nothing, so only the present day's part of it counts.
        turn = 2.0 * math.pi / DAY
        wave = (math.sin(turn * (at % DAY - self._peak)) + math.sin(turn * self._peak)) / turn
        return self._levels.expected(at) + self._levels.factor(at) * self._wave * wave


class DelayedProfile:
    """A shape that begins after ``lead`` seconds; until then the rate is that of its second 0."""

    def __init__(self, shape: RateProfile, lead: float) -> None:
        self._shape = shape
        self._lead = lead
        self._first = shape.factor(0.0)

    def factor(self, at: float) -> float:
        """Return the rate at second ``at``."""
        return self._shape.factor(max(0.0, at - self._lead))

    def expected(self, at: float) -> float:
        """Return the integral of `factor` from 0 to ``at``."""
        return min(at, self._lead) * self._first + self._shape.expected(max(0.0, at - self._lead))


class TimeWarp:
    """Time that runs as fast as the rate is high: `after` turns expected arrivals into seconds.

    Args:
        rate: mean arrivals per second, by which the shape is multiplied.
        start: second of the shape's time at which this begins.
    Cost: 2 to 9 us per arrival.
    """

    def __init__(self, shape: RateProfile, rate: float = 1.0, start: float = 0.0) -> None:
        self.now = start
        """Seconds of the shape's time that have passed."""
        self._shape = shape
        self._rate = rate
        self._expected = shape.expected(start) * rate

    def after(self, arrivals: float) -> float:
        """Go on to when so many more arrivals were expected, and return that second; infinity where never."""
        self._expected += arrivals
        wanted = self._expected / self._rate
        close = _CLOSE + 1e-14 * wanted
        shape, low, high = self._shape, self.now, math.inf
        at = low
        while high - low > close and low < FOREVER:
            error = wanted - shape.expected(at)
            level = shape.factor(at)
            if abs(error) <= close * level:
                self.now = max(self.now, at)
                return self.now
            if error > 0.0:
                low = at
            else:
                high = at
            # Newton's step; where it leaves what is known, halve (or, with no upper end yet, double) instead.
            at = at + error / level if level > 0.0 else math.inf
            if not low < at < high:
                at = (low + high) / 2.0 if high < math.inf else 2.0 * low + 1.0
        self.now = high if low < FOREVER else math.inf
        return self.now


def follow(shape: RateProfile, rate: float, rng: random.Random, *, cv: float = 1.0) -> Iterator[float]:
    """Yield arrivals at ``rate`` per second times the shape, until it never comes to another one.

    Args:
        cv: deviation of the gaps over their mean, as `arrivals.gamma` has it; 1 is Poisson, 0 even.
    """
    if not rate > 0.0:
        raise ValueError(f"rate must be above 0, not {rate}")
    warp = TimeWarp(shape, rate)
    at = warp.after(first_gap(cv, rng))
    while at < math.inf:
        yield at
        at = warp.after(gap(cv, rng))


def gap(cv: float, rng: random.Random) -> float:
    """Draw a gap of mean 1 between two arrivals."""
    if cv == 1.0:
        return rng.expovariate(1.0)
    return rng.gammavariate(1.0 / (cv * cv), cv * cv) if cv > 0.0 else 1.0


def first_gap(cv: float, rng: random.Random) -> float:
    """Draw the wait of an observer at any time: part of a gap that is met the likelier the longer it is.

    Source: renewal theory's equilibrium distribution; a gamma gap, weighted by its length, has a shape larger by 1.
    """
    share = rng.random()
    return share * (rng.gammavariate(1.0 / (cv * cv) + 1.0, cv * cv) if cv > 0.0 else 1.0)
