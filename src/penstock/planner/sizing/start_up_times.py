"""Start-up times of replicas, from the decision until they serve: measured ones, and those on the way."""

from typing import NamedTuple

import msgspec

from penstock.kernel.statistics import percentile
from penstock.planner.observation import PoolState

TIMES_MAX = 32
"""Start-ups that are remembered of each kind of replica."""

BEYOND = 5.0
"""Times the assumed start-up, up to which an unfinished start counts as evidence; above, it may never end. A guess."""


class StartingReplica(NamedTuple):
    """Replicas of a pool that are starting: in how many seconds each is expected (0 is any moment), the soonest
    first; and how many have been given up because they take too long."""

    due: tuple[float, ...] = ()
    given_up: int = 0

    @property
    def number(self) -> int:
        return len(self.due)


class StartUpTimes(msgspec.Struct):
    """Measured start-up times by model, kind of GPU, and whether the machine had the files (warm).

    Args:
        assumed: seconds for kinds that were never measured.
    """

    assumed: float = 60.0
    times: dict[str, list[float]] = msgspec.field(name="seen", default_factory=dict)

    def note(self, model: str, state: PoolState) -> None:
        """Add the start-up times in an observation."""
        for key, new in ((_times_key(model, state), state.start_up_times), (_asleep(model, state), state.wake_times)):
            if new:
                times = self.times.setdefault(key, [])
                times += new
                del times[:-TIMES_MAX]

    def quantile(self, model: str, state: PoolState, q: float) -> float:
        """Return the q-quantile (0..1) in seconds, of wakes where the next replica would be woken.

        Without measurements: for a wake those of starts; the other warmth's, else the assumed time, or the oldest
        start's time so far.
        """
        if state.asleep and (woken := self.times.get(_asleep(model, state))):
            return percentile(sorted(woken), q)
        for warm in (state.warm, not state.warm):
            times = self.times.get(_times_key(model, state, warm))
            if times:
                return percentile(sorted(times), q)
        late = [age for age in state.starting if self.assumed <= age <= BEYOND * self.assumed]
        return max(late, default=self.assumed)

    def measured(self, model: str, state: PoolState) -> int:
        """Return how many start-ups of this kind are known."""
        return len(self.times.get(_times_key(model, state), ()))

    def coming(self, model: str, state: PoolState, deadline: float) -> StartingReplica:
        """Return when the starting replicas are expected; those older than ``deadline`` seconds no longer count."""
        usual = self.quantile(model, state, 0.9)
        alive = [max(0.0, usual - age) for age in state.starting if age <= deadline]
        return StartingReplica(tuple(sorted(alive)), len(state.starting) - len(alive) + state.failed)


def _asleep(model: str, state: PoolState) -> str:
    return f"{model}|{state.pool.variant}|{state.pool.gpus}|asleep"


def _times_key(model: str, state: PoolState, warm: bool | None = None) -> str:
    pool, warm = state.pool, state.warm if warm is None else warm
    return f"{model}|{pool.variant}|{pool.gpus}|{'warm' if warm else 'cold'}"
