"""Pool scaling: how many replicas each pool should have, which of them go, and which numbers new ones get."""

from collections.abc import Iterable
from itertools import chain, count

from penstock.fleet.fleet_state import FleetPool, FleetState
from penstock.fleet.replica_lives import ReplicaLives
from penstock.fleet.victims import leaving_first
from penstock.kernel.machine import Nanos

REPLICAS_MAX = 1024
"""Most replicas of a pool whose replicas take no GPU."""


class PoolScaling:
    """Works out every pool's goal, and makes its replicas fit."""

    def __init__(self, state: FleetState, lives: ReplicaLives) -> None:
        self._state = state
        self._lives = lives

    def desired(self, pool: FleetPool) -> int:
        """Return how many replicas a pool should have, without the drained ones."""
        base = pool.configured.desired if pool.replicas is None else pool.replicas
        return base if pool.by_planner else max(0, base - len(drained_of(pool)))

    def limit(self, pool: FleetPool) -> int:
        """Return how many replicas a pool can have at most."""
        if not pool.gpus:
            return REPLICAS_MAX
        others = sum(other.goal * other.gpus for other in self._state.pools.values() if other is not pool)
        return max(0, (len(self._state.gpus.all) - others) // pool.gpus)

    def refusal(self, pool: FleetPool, replicas: int) -> str | None:
        """Return why a pool can't have so many replicas; None where it can."""
        most = self.limit(pool)
        if 0 <= replicas <= most:
            return None
        reason = f": each has {pool.gpus} of the GPUs {self._state.gpus}" if pool.gpus else ""
        return f"pool {pool.name} can have 0 to {most} replicas, not {replicas}{reason}"

    def apply(self, now: Nanos, pool: FleetPool) -> None:
        """Set a pool's goal from all that is desired of it; one that can't be is the pool's problem, and no goal."""
        if pool.attached:
            return
        replicas = self.desired(pool) + pool.surge
        pool.problem = self.refusal(pool, replicas)
        if pool.problem is not None:
            return
        without = drained_of(pool) | pool.retiring
        numbers = pool.number
        pool.recalled |= {number for worker in pool.without - without if (number := numbers(worker)) is not None}
        pool.recalled -= {number for worker in without if (number := numbers(worker)) is not None}
        pool.goal, pool.without = replicas, without
        self.settle(now, pool)

    def settle(self, now: Nanos, pool: FleetPool) -> None:
        """Decide which replicas stay, which go and which are new; servers of others come and go by themselves."""
        if pool.attached:
            return
        lives, state = self._lives, self._state
        for life in state.of(pool.name):
            if life.worker in pool.without:
                lives.want(now, life, False)
                lives.dismiss(life, "it was drained")
        staying = [life for life in state.of(pool.name) if life.wanted]
        missing = pool.goal - len(staying)
        for life in leaving_first(staying)[:-missing] if missing < 0 and pool.begun else ():
            lives.want(now, life, False)
        # One that still drains has its cache; then come those that need not be started.
        back = (life for life in state.of(pool.name) if not life.wanted) if missing > 0 else ()
        for life in sorted(back, key=lambda life: life.phase != "draining"):
            if missing > 0 and lives.may_stay(life) and life.worker not in pool.without:
                lives.want(now, life, True)
                missing -= 1
        numbers = {life.number: life for life in state.of(pool.name)}
        recalled = pool.recalled
        # A replica that still ends is not replaced by another: it starts again once its number is free.
        pool.recalled = {
            number
            for number in recalled
            if number in numbers and not numbers[number].wanted and numbers[number].phase != "asleep"
        }
        missing -= len(pool.recalled)
        for number in self._free_numbers(pool, recalled, numbers):
            if missing <= 0:
                break
            life = lives.create(now, pool, number)
            if pool.begun:
                lives.begin(now, life)
            missing -= 1

    @staticmethod
    def _free_numbers(pool: FleetPool, first: Iterable[int], taken: Iterable[int]) -> Iterable[int]:
        used = set(taken)
        for number in chain(sorted(first), count()):
            if number not in used and pool.worker(number) not in pool.without:
                used.add(number)
                yield number


def drained_of(pool: FleetPool) -> set[str]:
    """Return the drained replicas of a pool: for a later scaling by an operator they count no more."""
    if pool.by_planner or pool.replicas is None:
        return set(pool.drains)
    return {worker for worker, drain in pool.drains.items() if drain.at > pool.desired_at}
