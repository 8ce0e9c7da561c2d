"""Return times: how soon an idle worker is needed again, and how long it is kept because of it.

Removing a worker saves its GPU until it is needed again. Where it is needed before a new one could
serve, its absence costs misses, and the start-up is paid for nothing. Both are counted for each size of the fleet, each
time the need comes back, and a worker is kept for as long as would have cost least over those times: the chance that it
is needed again is learnt from the traffic's own return times, and priced like a miss. A need that the forecast predicts
a start-up ahead costs nothing but the start: so a slow wave teaches removal, and bursts teach keeping. Before the
first return, a worker is kept for as long as a start takes: in any case that costs at most twice the minimum.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock.planner.remembering import Remembering

RETURNS_MAX = 12
"""Return times that are remembered of each size."""
FADE = 0.85
"""Weight of an older return time, relative to the next."""
NEVER = 1.0
"""Weight of the return that never comes, which every size begins with: a first return alone must not hold for hours."""
LONGEST = 3600.0
"""Seconds above which no worker is kept for a return: the mix, the hour and the fleet are different by then."""


class ReturnTime(NamedTuple):
    """A need that came back. ``gap``: seconds for which the worker was not needed; ``cost``: GPU-seconds of harm that
    its absence does, or would have done, until a new one serves."""

    gap: float
    cost: float


class _Begun(NamedTuple):
    """A need that came back at second ``at`` after ``gap`` seconds, with the harm of the worker's lack until a new one
    serves still unknown. ``cost``: so far."""

    at: float
    gap: float
    lead: float
    cost: float = 0.0


class ReturnTimes(Remembering):
    """Return times of one role's workers."""

    _last: dict[int, float]
    """Size -> second when so many were last needed, or would be within a start-up time."""
    _used: dict[int, float]
    """Size -> second when the arrivals last needed so many: no margin, and no feared need."""
    _returns: dict[int, list[ReturnTime]]
    _begun: dict[int, _Begun]
    _looked: float
    """Second of the last update."""

    def __init__(self) -> None:
        self._last = {}
        self._used = {}
        self._returns = {}
        self._begun = {}
        self._looked = 0.0

    def look(
        self,
        at: float,
        *,
        used: int,
        now: int,
        order: int,
        needed: int,
        lead: float,
        harm: Callable[[int], float],
    ) -> None:
        """Update with the present need.

        Args:
            used: workers that the recent arrivals need.
            now: workers that the present rate needs.
            order: workers for the rate a start-up time from now: those that would be ordered.
            needed: the largest need until then, with a margin: below it no worker is removed.
            lead: seconds from an order until the worker serves.
            harm: size -> present cost in GPUs of one worker less than that.
        """
        for size in range(1, order + 1):
            last = self._used.get(size, at)
            if last < self._looked and self._last.get(size, at) < self._looked and size not in self._begun:
                self._begun[size] = _Begun(at, at - last, lead)
        for size, begun in list(self._begun.items()):
            if size <= now:
                begun = begun._replace(cost=begun.cost + max(0.0, harm(size)) * (at - self._looked))
                self._begun[size] = begun
            if at - begun.at >= begun.lead:
                returns = self._returns.setdefault(size, [])
                returns.append(ReturnTime(begun.gap, begun.cost))
                del returns[:-RETURNS_MAX]
                del self._begun[size]
        for size in range(1, max(needed, order) + 1):
            self._last[size] = at
        for size in range(1, used + 1):
            self._used[size] = at
        self._looked = at

    def worth_keeping(self, at: float, most: int, hold: float, lead: float, gpus: int) -> tuple[int, float, float]:
        """Return how many workers are worth keeping at present, and for the last of them: seconds since it was needed,
        and for how many it is kept.

        Args:
            most: how many there are.
            hold: seconds for which every worker is kept.
        """
        for size in range(most, 0, -1):
            for times, patience in ((self._last, hold), (self._used, self.patience(size, lead, gpus))):
                last = times.get(size)
                if last is not None and at - last < patience - 1e-6:
                    return size, at - last, patience
        return 0, 0.0, hold

    def patience(self, size: int, lead: float, gpus: int) -> float:
        """Return for how many seconds the last worker of so many is worth its GPUs without being needed.

        That is the time which, over the observed returns and one that never comes, would have cost least.
        """
        returns = self._returns.get(size, [])
        if not returns:
            return lead
        weights = [FADE ** (len(returns) - 1 - place) for place in range(len(returns))]

        def cost(patience: float) -> float:
            total = NEVER * gpus * min(patience, LONGEST)
            for weight, each in zip(weights, returns, strict=True):
                over = each.gap > patience
                total += weight * (gpus * min(each.gap, patience) + over * (each.cost + gpus * lead))
            return total

        return min((0.0, *sorted(each.gap + 1.0 for each in returns if each.gap <= LONGEST)), key=cost)
