"""Worker observers of one frontend: statistics of engine passes and canary probes, beside the requests."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from penstock.adapters.http_session import HttpSession
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import Target, WorkerCard, WorkerId
from penstock.router.events import TiersMeasured, WorkerCordoned
from penstock.router.router import Router
from penstock.router.status_rows import RouterStatus
from penstock.router.workers.active import Active
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.node.canary import Canary
from penstock.runtime.node.engine_stats import EngineStats, LoadLook, look

log = logging.getLogger("penstock.observers")

NOTHING = LoadLook(0, 0.0, 0.0)


class WorkerObservers:
    """The observers of one frontend's workers: `start` and `stop` per worker, `run` until cancelled, then `close`."""

    def __init__(
        self,
        settings: ClusterSettings,
        live: LiveDriver,
        router: Router,
        name: str,
        http: Callable[[], HttpSession] = HttpSession,
    ) -> None:
        self.faults = 0
        """Observers that ended by our own bug."""
        self._live = live
        self._router = router
        self.stats = EngineStats(settings.engine_stats, self._sample_loads, name, http(), self._priced)
        self.canary = Canary(settings.canary, self._busy, self._cordon, http())

    def start(self, card: WorkerCard) -> None:
        """Begin to watch a worker."""
        self.stats.start(card)
        self.canary.start(card)

    def stop(self, card: WorkerCard) -> None:
        """Watch a worker no more."""
        self.stats.stop(card)
        self.canary.stop(card)

    async def run(self) -> None:
        """Watch until cancelled."""
        watching = (("statistics", self.stats.run()), ("canaries", self.canary.run()))
        await asyncio.gather(*(self._guarded(what, run) for what, run in watching))

    async def close(self) -> None:
        await self.canary.close()
        await self.stats.close()

    def describe(self, status: RouterStatus) -> None:
        """Add the observations of each worker to its row of a status, and what an operator should know of them."""
        status.findings += self.stats.findings()
        for row in status.workers:
            row.steps = self.stats.status(WorkerId(row.id))
            row.canary = self.canary.status(WorkerId(row.id))

    async def _guarded(self, what: str, run: Coroutine[Any, Any, None]) -> None:
        """Supervision boundary: one observer must not end the other, nor end silently."""
        try:
            await run
        except Exception:
            self.faults += 1
            log.exception("there are no %s of workers any more", what)

    def _sample_loads(self, workers: Sequence[WorkerId]) -> list[LoadLook]:
        """Sample what is placed on workers. Cost: O(workers + all in flight)."""
        placed: dict[WorkerId, list[Active]] = {}
        for pool in self._router.pools.values():
            for active in pool.active:
                placed.setdefault(active.target.worker, []).append(active)
        now, looks = self._live.now(), []
        for worker in workers:
            known, here = self._router.roster.get(worker), placed.get(worker)
            if known is None or here is None:
                looks.append(NOTHING)
            else:
                looks.append(look(here, self._router.pools[known.card.model].index.block_size, now))
        return looks

    def _busy(self, worker: WorkerId) -> tuple[int, int] | None:
        known = self._router.roster.get(worker)
        if known is None or known.state != "ready":
            return None
        active = self._router.pools[known.card.model].active
        running = sum(active.load(Target(worker, rank)).requests for rank in range(known.card.ranks))
        return running, known.requests

    def _priced(self, worker: WorkerId, costs: LoadCosts) -> None:
        self._live.post("router", TiersMeasured(worker=worker, costs=costs))

    def _cordon(self, worker: WorkerId, on: bool, reason: str) -> None:
        self._live.post("router", WorkerCordoned(worker=worker, on=on, reason=reason))
