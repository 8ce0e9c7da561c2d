"""Rolling restart: replaces all engines, then all frontends, one by one, without losing a request.

A successor is started before its predecessor is drained wherever the machine has room for it. Where every GPU is taken,
the predecessor is drained first; for a pool's last engine this happens only with ``force``.
"""

from penstock.fleet import events
from penstock.fleet.fleet_state import FleetPool, FleetState, Life, RestartOrder, RestartState
from penstock.fleet.pool_scaling import PoolScaling
from penstock.kernel.machine import Effect, Nanos


class RollingRestart:
    """Carries out one restart after another; `advance` after every event that may be what it waits for."""

    def __init__(self, state: FleetState, scaling: PoolScaling, effects: list[Effect]) -> None:
        self._state = state
        self._scaling = scaling
        self._effects = effects

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
        self._did(restart, f"frontend-{restart.frontends.pop(0)}")
        restart.step = "next"

    def advance(self, now: Nanos) -> None:
        """Go on as far as nothing has to be waited for."""
        while self._step(now):
            pass

    def _step(self, now: Nanos) -> bool:
        """Do the next thing; return False where something has to be waited for."""
        restart, order = self._state.restart, self._state.next_restart
        if restart is None:
            if order is not None:
                self._begin(order)
            return order is not None
        if restart.step == "frontend":
            return False
        if not restart.engines:
            return self._after_engines(now, restart)
        name, worker = restart.engines[0]
        pool, lives = self._state.pools[name], self._state.of(name)
        if restart.step == "next":
            return self._replace(now, restart, pool, worker, lives)
        ready = sum(life.state == "ready" for life in lives)
        if restart.step == "surge" and ready >= pool.goal:
            self._retire(now, restart, pool, worker)
        elif restart.step == "retire" and not any(life.worker == worker for life in lives):
            pool.surge = 0
            pool.retiring.discard(worker)
            restart.before.discard(worker)
            restart.step = "refill"
            self._apply(now, pool)
        elif restart.step == "refill" and ready >= pool.goal:
            restart.engines.pop(0)
            restart.step = "next"
            if not restart.renaming:
                self._did(restart, worker)
        else:
            return self._failed(now, restart, lives)
        return True

    def _begin(self, order: RestartOrder) -> None:
        former = {
            name: [life.worker for life in self._state.of(name)]
            for name, pool in self._state.pools.items()
            if not pool.attached
        }
        engines = [(name, worker) for name, workers in former.items() for worker in workers]
        self._state.next_restart = None
        restart = RestartState(order=order, former=former, engines=engines, frontends=list(order.frontends))
        self._state.restart = restart
        self._report("running")

    def _after_engines(self, now: Nanos, restart: RestartState) -> bool:
        if not restart.renaming:
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

    def _replace(self, now: Nanos, restart: RestartState, pool: FleetPool, worker: str, lives: list[Life]) -> bool:
        """Begin to replace one engine."""
        if not any(life.worker == worker for life in lives):
            restart.engines.pop(0)  # it left meanwhile
            if not restart.renaming:
                self._did(restart, worker)
            return True
        restart.before = {life.worker for life in lives}
        desired = self._scaling.desired(pool)
        if desired + 1 <= self._scaling.limit(pool):
            restart.step, pool.surge = "surge", 1
            self._apply(now, pool)
        elif desired >= 2 or restart.order.force:
            self._retire(now, restart, pool, worker, surge=-1)
        else:
            self._end(
                now,
                f"{worker} is its pool's last engine, and no GPU is free for a successor: requests would be refused "
                "('penstock restart --force' does it all the same)",
            )
        return True

    def _retire(self, now: Nanos, restart: RestartState, pool: FleetPool, worker: str, surge: int = 0) -> None:
        restart.step, pool.surge = "retire", surge
        pool.retiring.add(worker)
        self._apply(now, pool)

    def _apply(self, now: Nanos, pool: FleetPool) -> None:
        """Set a pool's goal; end the restart where it can't be."""
        self._scaling.apply(now, pool)
        if pool.problem is not None:
            self._end(now, pool.problem)

    def _failed(self, now: Nanos, restart: RestartState, lives: list[Life]) -> bool:
        """End the restart where an engine that was not there before does not start."""
        for life in lives:
            if life.state == "failed" and life.worker not in restart.before:
                self._end(now, f"{life.worker} does not start: {life.reason}")
                return True
        return False

    def _did(self, restart: RestartState, name: str) -> None:
        restart.done.append(name)
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
