"""Rolling restart: replaces all engines, some at a time, then all frontends, one by one, without losing a request.

A successor is started before its predecessor is drained wherever the machine has room for it. Where every GPU is taken,
the predecessor is drained first; for a pool's last engine only with ``force``, or where the pool allows it.

Replicas that are outdated need no order: they are replaced whenever no other restart is under way.
"""

import msgspec

from penstock.fleet import events
from penstock.fleet.fleet_state import FleetPool, FleetState, Life, RestartOrder, RestartState
from penstock.fleet.pool_scaling import PoolScaling
from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.values import Replica

OUTDATED = RestartOrder(revision="outdated", force=False, frontends=(), outdated=True)
"""The restart that is always desired."""
SHARE = 20
"""One in so many engines of a pool is replaced at a time, where its strategy does not say how many: of 200 ten."""
WAITS = "others are replaced before it"


class RollingRestart:
    """Carries out one restart after another; `advance` after every event that may be what it waits for."""

    def __init__(self, state: FleetState, scaling: PoolScaling, effects: list[Effect]) -> None:
        self._state = state
        self._scaling = scaling
        self._effects = effects
        self._look = True

    def look(self) -> None:
        """Look for outdated replicas again: some were adopted, and none becomes outdated in another way."""
        self._look = True

    def desired(self, order: RestartOrder) -> None:
        """Let a restart begin with the next `advance`, or follow the one under way."""
        self._state.next_restart = order

    def replaced(self, now: Nanos, event: events.FrontendReplaced) -> None:
        """A frontend was replaced."""
        restart = self._state.restart
        if restart is None or restart.step != "frontend" or restart.frontends[0] != event.index:
            return
        if event.problem is not None:
            return self._end(now, event.problem)
        self._did(restart, [f"frontend-{restart.frontends.pop(0)}"])
        restart.step = "next"

    def shown(self, life: Life) -> Replica:
        """Return a replica as pools show it."""
        if not life.outdated:
            return life.replica
        restart = self._state.restart
        waits = WAITS if restart is None else restart.waits.get(life.pool, WAITS)
        return msgspec.structs.replace(life.replica, outdated=waits)

    def advance(self, now: Nanos) -> None:
        """Go on as far as nothing has to be waited for."""
        while self._step(now):
            pass

    def _step(self, now: Nanos) -> bool:
        """Do the next thing; return False where something has to be waited for."""
        restart, order = self._state.restart, self._state.next_restart
        if restart is None:
            if order is None and self._look:
                self._look = any(life.outdated for life in self._state.lives.values())
                order = OUTDATED if self._look and all(pool.begun for pool in self._state.pools.values()) else None
            if order is not None:
                self._begin(order)
            return order is not None
        if restart.step == "frontend":
            return False
        if restart.order.outdated and restart.waits and order is not None:
            self._end(now, None)  # it begins again after that, where something is left to be done
            return True
        if not restart.engines:
            return self._after_engines(now, restart)
        if restart.step == "next":
            return self._replace(now, restart)
        name, batch = restart.engines[0][0], [worker for _, worker in restart.engines[: restart.batch]]
        pool = self._state.pools[name]
        lives = [life for life in self._state.lives.values() if life.pool == name]
        ready = _serving(lives)
        if restart.step == "surge" and (ready >= pool.goal or self._gives_way(restart, pool, lives)):
            self._retire(now, restart, pool)
        elif restart.step == "retire" and self._state.lives.keys().isdisjoint(pool.retiring):
            pool.surge = 0
            pool.retiring.clear()
            restart.before.difference_update(batch)
            restart.step = "refill"
            self._apply(now, pool)
        elif restart.step == "refill" and ready >= pool.goal:
            del restart.engines[: restart.batch]
            restart.step = "next"
            if not restart.renaming:
                self._did(restart, batch)
        else:
            return self._failed(now, restart, pool, lives)
        restart.waits.clear()
        return True

    def _begin(self, order: RestartOrder) -> None:
        former = {
            name: [life.worker for life in self._state.of(name)]
            for name, pool in self._state.pools.items()
            if not pool.attached
        }
        lives = self._state.lives
        engines = [(name, worker) for name, workers in former.items() for worker in workers]
        engines = [(name, worker) for name, worker in engines if lives[worker].outdated or not order.outdated]
        self._state.next_restart = None
        restart = RestartState(order=order, former=former, engines=engines, frontends=list(order.frontends))
        self._state.restart = restart
        self._report("running")

    def _after_engines(self, now: Nanos, restart: RestartState) -> bool:
        if not restart.renaming and not restart.order.outdated:
            # The first successor ran beside all predecessors, so its number is a new one, and the number of the last
            # predecessor is free. Without this each restart would shift the names in every chart by one.
            restart.renaming = True
            for name, former in restart.former.items():
                there = [life.worker for life in self._state.of(name)]
                if len(there) == len(former):  # else the pool was scaled meanwhile
                    restart.engines += [(name, worker) for worker in sorted(set(there) - set(former))]
        elif restart.frontends:
            restart.step = "frontend"
            self._effects.append(events.ReplaceFrontend(index=restart.frontends[0]))
        else:
            self._end(now, None)
        return True

    def _replace(self, now: Nanos, restart: RestartState) -> bool:
        """Begin to replace engines of a pool: those that serve nobody come first."""
        lives = self._state.lives
        restart.waits.clear()
        engines = sorted(restart.engines, key=lambda engine: not _useless(lives.get(engine[1])))
        for engine in engines:
            name, worker = engine
            if (life := self._due(restart, worker)) is None:
                restart.engines.remove(engine)  # it left meanwhile, or was started anew
                if not restart.renaming:
                    self._did(restart, [worker])
                return True
            if name in restart.waits:
                continue
            alike = [each for pool, other in engines if pool == name and (each := self._due(restart, other))]
            alike = [each for each in alike if _useless(each) == _useless(life)]
            waits = self._begun(now, restart, self._state.pools[name], alike)
            if waits is None:
                return True
            restart.waits[name] = waits
        return False

    def _due(self, restart: RestartState, worker: str) -> Life | None:
        """Return an engine that is to be replaced; None where it left meanwhile, or was started anew."""
        life = self._state.lives.get(worker)
        return life if life and (life.outdated or restart.renaming or not restart.order.outdated) else None

    def _begun(self, now: Nanos, restart: RestartState, pool: FleetPool, alike: list[Life]) -> str | None:
        """Begin to replace some engines; return what they wait for where that can't be yet.

        Args:
            alike: those of the pool that are left, all of them useless or none.
        """
        lives, desired = self._state.of(pool.name), self._scaling.desired(pool)
        needed = min(desired, pool.goal)  # more may be desired than can be
        ready = _serving(lives)
        spare, surge, lack = ready - needed, self._surge(pool), self._lack(restart, pool)
        room = min(surge, self._scaling.limit(pool) - desired)
        first = alike[:1]
        restart.before = {other.worker for other in lives}
        if restart.order.outdated and (problem := self._scaling.refusal(pool, desired)) is not None:
            return problem
        if _serving(first) <= spare:
            self._set_batch(restart, _at_most(alike[: max(1, surge, lack)], spare))
            self._retire(now, restart, pool)
        elif _useless(alike[0]):
            batch = self._set_batch(restart, alike[: max(1, surge, lack)])
            there = sum(other.wanted for other in lives) - sum(one.wanted for one in batch)
            self._retire(now, restart, pool, surge=min(0, there - needed))
        elif room > 0:
            batch = self._set_batch(restart, alike[:room])
            restart.step, pool.surge = "surge", len(batch)
            self._apply(now, pool)
        elif not lack and restart.order.outdated:
            return (
                f"no GPU is free for its successor, and the pool may lack none meanwhile: free {pool.gpus}, or set "
                "maxUnavailable to 1"
            )
        elif not lack:
            self._end(
                now,
                f"{alike[0].worker} is its pool's last engine, and no GPU is free for a successor: requests would be "
                "refused ('penstock restart --force' does it all the same)",
            )
        elif _serving(first) > spare + lack:
            return "others of its pool do not serve yet"
        else:
            batch = self._set_batch(restart, _at_most(alike[:lack], spare + lack))
            self._retire(now, restart, pool, surge=-len(batch))
        return None

    def _surge(self, pool: FleetPool) -> int:
        """Return how many engines a pool may have beyond those that are desired, for a while."""
        return self._share(pool) if pool.max_surge is None else pool.max_surge

    def _lack(self, restart: RestartState, pool: FleetPool) -> int:
        """Return how many engines a pool may have less than are desired, for a while."""
        if pool.max_unavailable or (pool.max_unavailable == 0 and not restart.order.force):
            return pool.max_unavailable
        may = restart.order.force or pool.max_surge == 0 or self._scaling.desired(pool) >= 2
        return self._share(pool) if may else 0

    def _share(self, pool: FleetPool) -> int:
        return max(1, self._scaling.desired(pool) // SHARE)

    def _gives_way(self, restart: RestartState, pool: FleetPool, lives: list[Life]) -> bool:
        """Return whether engines make room for their successors, which have none; how many do may be fewer."""
        workers = [worker for _, worker in restart.engines[: restart.batch]]
        if not any(life.unplaced and life.worker not in workers for life in lives):
            return False
        batch = [life for worker in workers if (life := self._state.lives.get(worker))]
        ready = _serving(lives)
        room = ready - self._scaling.desired(pool) + self._lack(restart, pool)
        batch = _at_most(batch, room)
        if batch:
            self._set_batch(restart, batch)
        return bool(batch)

    def _set_batch(self, restart: RestartState, batch: list[Life]) -> list[Life]:
        """Let engines be those that are replaced now."""
        taken = [(life.pool, life.worker) for life in batch]
        restart.engines[:] = taken + [engine for engine in restart.engines if engine not in taken]
        restart.batch = len(taken)
        return batch

    def _retire(self, now: Nanos, restart: RestartState, pool: FleetPool, surge: int = 0) -> None:
        restart.step, pool.surge = "retire", surge
        pool.retiring.update(worker for _, worker in restart.engines[: restart.batch])
        self._apply(now, pool)

    def _apply(self, now: Nanos, pool: FleetPool) -> None:
        """Set a pool's goal; end the restart where it can't be."""
        self._scaling.apply(now, pool)
        if pool.problem is not None:
            self._end(now, pool.problem)

    def _failed(self, now: Nanos, restart: RestartState, pool: FleetPool, lives: list[Life]) -> bool:
        """End the restart where an engine that was not there before does not start; one of outdated engines waits."""
        troubled = sorted([life for life in lives if life.reason], key=lambda life: life.number)
        fresh = (life for life in troubled if life.worker not in restart.before)
        failed = next((life for life in fresh if life.state == "failed"), None)
        if failed is not None and not restart.order.outdated:
            self._end(now, f"{failed.worker} does not start: {failed.reason}")
            return True
        words = [
            f"its successor {life.worker} is {life.state}: {life.reason}" for life in troubled if not life.outdated
        ]
        restart.waits[pool.name] = "; ".join(words) or "its successor starts, or it finishes its requests"
        return False

    def _did(self, restart: RestartState, names: list[str]) -> None:
        restart.done += names
        self._report("running")

    def _end(self, now: Nanos, problem: str | None) -> None:
        restart = self._state.restart
        assert restart is not None
        self._report("done" if problem is None else "failed", problem)
        self._state.restart = None
        for pool in self._state.pools.values():
            if pool.surge or pool.retiring:
                pool.surge = 0
                pool.retiring.clear()
                self._scaling.apply(now, pool)

    def _report(self, state: events.RestartProgress, problem: str | None = None) -> None:
        restart = self._state.restart
        assert restart is not None
        left = len(restart.frontends) + (0 if restart.renaming else len(restart.engines))
        self._effects.append(
            events.RestartReported(
                revision=restart.order.revision, state=state, done=tuple(restart.done), left=left, problem=problem
            )
        )


def _useless(life: Life | None) -> bool:
    """Return whether nobody misses an engine: it failed, or was taken over and frontends do not know it."""
    if life is None or life.state == "failed":
        return True
    return life.adopted and life.role is None and life.phase in ("queued", "starting", "probing")


def _serving(lives: list[Life]) -> int:
    return sum([life.phase == "ready" for life in lives])


def _at_most(lives: list[Life], serving: int) -> list[Life]:
    """Return the first of some engines, so many that no more than ``serving`` of them serve."""
    return [life for place, life in enumerate(lives, 1) if _serving(lives[:place]) <= serving]
