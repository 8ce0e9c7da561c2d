"""`Observer`: a planner's observation of a simulated cluster, as of a live one: traffic, pools and engines."""

from collections.abc import Mapping

from penstock.kernel.machine import SECOND, Nanos, seconds
from penstock.kernel.values import Pool
from penstock.planner.observation import EngineState, ModelState, Observation, PoolState
from penstock.planner.sizing.request_counts import RequestCounts
from penstock_lab.simulate.simulated_fleet import SimulatedFleet, SimulatedWorker
from penstock_lab.simulate.simulation_plan import SimulationPlan


class Observer:
    """Observe a fleet, as a client of its engines does: it takes the engines' windows, which only one can."""

    def __init__(self, plan: SimulationPlan, fleet: SimulatedFleet) -> None:
        self.counts = RequestCounts()
        self._plan = plan
        self._fleet = fleet
        self._at: Nanos = 0
        self._reported: set[int] = set()
        """Places in the fleet's ``lives`` of workers whose start-up was reported."""

    def look(self, now: Nanos, pools: Mapping[str, Pool], queued: int) -> Observation:
        """Return the observation of now, counted since the one before.

        Args:
            pools: as they should be.
            queued: requests that wait in the router.
        """
        window = (now - self._at) / SECOND
        traffic, self.counts = self.counts.totals(window), RequestCounts()
        states = {name: self._state(name, now, pool) for name, pool in pools.items()}
        self._at = now
        held = 0 if any(state.ready for state in states.values()) else queued
        model = ModelState(traffic=traffic, pools=states, queued=queued, without_worker=held)
        return Observation(at=seconds(now), window=window, models={self._plan.model: model})

    def _state(self, name: str, now: Nanos, pool: Pool) -> PoolState:
        workers = self._fleet.of(name)
        # Each is reported once, whether it became ready before or after the look of the same instant. A worker that
        # serves at the very beginning did not start.
        fresh = {
            place: (life.ready - life.started) / SECOND
            for place, life in enumerate(self._fleet.lives)
            if life.pool == name and life.ready and place not in self._reported
        }
        woken = [spent for place, spent in fresh.items() if self._fleet.lives[place].woken]
        began = [spent for place, spent in fresh.items() if not self._fleet.lives[place].woken]
        self._reported |= fresh.keys()
        starting = sorted((now - w.life.started) / SECOND for w in workers if w.state == "starting")
        return PoolState(
            pool=pool,
            ready=sum(worker.state == "ready" for worker in workers),
            starting=tuple(reversed(starting)),
            draining=sum(worker.state == "draining" for worker in workers),
            start_up_times=tuple(began),
            wake_times=tuple(woken),
            asleep=sum(worker.rpartition("-")[0] == name for worker in self._fleet.asleep),
            host_memory=None if self._fleet.asleep else 0,
            flips=pool.role != "aggregated",
            engines=tuple(self._engine(worker, now) for worker in workers if worker.state == "ready"),
        )

    def _engine(self, worker: SimulatedWorker, now: Nanos) -> EngineState:
        engine, card = worker.engine, worker.card
        return EngineState(
            worker=card.id,
            role=card.role,
            steps=engine.take_stats(now),
            running=engine.running,
            waiting=engine.waiting,
            queued_prefill_tokens=engine.waiting_prefill_tokens,
            queued_decode_kv=0,
            decode_kv=engine.decode_kv(now),
            limits=card.limits,
        )
