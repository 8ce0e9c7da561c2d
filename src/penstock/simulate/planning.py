"""What does a planner see of a simulated cluster? The same as of a live one: traffic, pools and engines."""

from collections.abc import Mapping

from penstock.kernel.machine import SECOND, Nanos, seconds
from penstock.planner.counts import ModelCounts
from penstock.planner.seen import EngineSeen, ModelSeen, Observation, PoolSeen
from penstock.simulate.fleet import Fleet, Worker
from penstock.simulate.plan import Plan


class Seeing:
    """Look at a fleet, as somebody who asks its engines does. One for each who looks.

    Args:
        asks_engines: whether the looker takes the engines' windows: only one can.
    """

    def __init__(self, plan: Plan, fleet: Fleet, *, asks_engines: bool = True) -> None:
        self.counts = ModelCounts()
        self._plan = plan
        self._fleet = fleet
        self._asks = asks_engines
        self._at: Nanos = 0

    def look(self, now: Nanos, desired: Mapping[str, int], queued: int) -> Observation:
        """Return what there is to see now, counted since the look before.

        Args:
            desired: pool -> workers that should be.
            queued: requests that wait in the router.
        """
        window = (now - self._at) / SECOND
        traffic, self.counts = self.counts.told(window), ModelCounts()
        pools = {name: self._pool(name, now, desired[name]) for name in self._plan.pools}
        self._at = now
        held = 0 if any(pool.ready for pool in pools.values()) else queued
        model = ModelSeen(traffic=traffic, pools=pools, queued=queued, held=held)
        return Observation(at=seconds(now), window=window, models={self._plan.model: model})

    def _pool(self, name: str, now: Nanos, desired: int) -> PoolSeen:
        kind, workers = self._plan.pools[name], self._fleet.of(name)
        came = [
            (life.ready - life.started) / SECOND
            for life in self._fleet.lives
            if life.pool == name and life.ready is not None and self._at < life.ready <= now
        ]
        starting = sorted((now - w.life.started) / SECOND for w in workers if w.state == "starting")
        return PoolSeen(
            role=kind.role,
            gpus=kind.gpus,
            desired=desired,
            ready=sum(worker.state == "ready" for worker in workers),
            starting=tuple(reversed(starting)),
            draining=sum(worker.state == "draining" for worker in workers),
            came=tuple(came),
            flips=kind.role != "aggregated",
            engines=tuple(self._engine(worker, now) for worker in workers if worker.state == "ready"),
        )

    def _engine(self, worker: Worker, now: Nanos) -> EngineSeen:
        engine, card = worker.engine, worker.card
        steps = engine.take_stats(now) if self._asks else None
        return EngineSeen(
            worker=card.id,
            role=card.role,
            steps=steps,
            running=engine.running,
            waiting=engine.waiting,
            queued_prefill_tokens=engine.waiting_prefill_tokens,
            queued_decode_kv=0,
            decode_kv=engine.decode_kv(now),
            kv_tokens=None if card.kv_blocks is None or card.block_size is None else card.kv_blocks * card.block_size,
            max_seqs=card.max_seqs,
            max_batched_tokens=card.max_batched_tokens,
            max_len=card.max_len,
        )
