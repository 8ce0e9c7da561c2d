"""Attached servers: engines that others run, known by URL; their cards are in the store while they are healthy."""

import asyncio
import logging
from typing import Protocol

from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import WorkerCard, WorkerId

log = logging.getLogger("penstock.fleet")

HEALTH_EVERY = 2.0
"""Seconds between health checks."""
HEALTH_MISSES = 2
"""Failed checks in a row after which a server is taken out."""


class ServerRegister(Protocol):
    """Announces servers to the routers: `penstock.runtime.supervision.engine_fleet.EngineFleet`."""

    async def answers(self, url: str) -> bool: ...
    async def describe(self, worker: WorkerId, model: str, url: str, known: dict[str, object]) -> WorkerCard: ...
    async def announce(self, card: WorkerCard, *, draining: bool = False) -> None: ...
    async def drain(self, card: WorkerCard) -> object: ...
    async def withdraw(self, worker: WorkerId) -> None: ...
    def silent(self, worker: WorkerId) -> None: ...


class AttachedServer:
    """One server by its URL.

    `ready` raises where the server could not be reached at the cluster's start. Later it may come and go.
    """

    def __init__(self, register: ServerRegister, worker: WorkerId, model: str, url: str, pool: PoolSettings) -> None:
        self.worker = worker
        self.model = model
        self.url = url
        self.card: WorkerCard | None = None
        """Its card, while it answers."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.parked = False
        """Whether it was drained, and gets no requests until `unpark`."""
        self._draining: asyncio.Task[object] | None = None
        self._register = register
        self._known = overrides_of(pool, url)

    async def run(self) -> None:
        """Follow its health until cancelled."""
        misses = 0
        while True:
            if self.card is None:
                await self._come()
                misses = 0
            elif await self._register.answers(self.url):
                misses = 0
            else:
                misses += 1
                if misses >= HEALTH_MISSES:
                    log.warning("server %s does not answer its health check; %s is taken out", self.url, self.worker)
                    self.card = None
                    self._register.silent(self.worker)
                    await self._register.withdraw(self.worker)
            await asyncio.sleep(HEALTH_EVERY)

    async def park(self) -> None:
        """Take the server from the routers until `unpark`; it runs on by itself."""
        if self.parked:
            return
        self.parked = True
        if self.card is not None:
            self._draining = asyncio.create_task(self._register.drain(self.card), name=f"drain-{self.worker}")

    async def unpark(self) -> None:
        """Give the server back to the routers."""
        if not self.parked:
            return
        self.parked = False
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)
            self._draining = None
        if self.card is not None:
            self.card = None
            await self._come()  # with a newer epoch: to the routers it is a new worker

    async def _come(self) -> None:
        try:
            card = await self._register.describe(self.worker, self.model, self.url, self._known)
            await self._register.announce(card, draining=self.parked)
        except PenstockError as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            log.warning("server %s is away: %s", self.url, error)
            return
        self.card = card
        log.info("server %s is there as %s", self.url, self.worker)
        if not self.ready.done():
            self.ready.set_result(None)
