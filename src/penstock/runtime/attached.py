"""How is a server looked after that somebody else runs? By its health: in the store while it answers."""

import asyncio
import logging
from typing import Protocol

from penstock.adapters.engines.known import known_of
from penstock.config.cluster import PoolSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import WorkerCard, WorkerId

log = logging.getLogger("penstock.fleet")

HEALTH_EVERY = 2.0
"""Seconds between looks."""
HEALTH_MISSES = 2
"""Misses in a row that take a server out."""


class Register(Protocol):
    """Who tells the routers: `penstock.runtime.fleet.Fleet`."""

    async def answers(self, url: str) -> bool: ...
    async def describe(self, worker: WorkerId, model: str, url: str, known: dict[str, object]) -> WorkerCard: ...
    async def announce(self, card: WorkerCard, *, draining: bool = False) -> None: ...
    async def drain(self, card: WorkerCard) -> object: ...
    async def withdraw(self, worker: WorkerId) -> None: ...


class Attached:
    """One server by its URL.

    Raises from `ready`: it could not be reached when the cluster started. Later it may come and go.
    """

    def __init__(self, register: Register, worker: WorkerId, model: str, url: str, pool: PoolSettings) -> None:
        self.worker = worker
        self.model = model
        self.url = url
        self.card: WorkerCard | None = None
        """What it is, while it is there."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.parked = False
        """It was drained, and gets no requests until `unpark`."""
        self._draining: asyncio.Task[object] | None = None
        self._register = register
        self._known = known_of(pool, url)

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
                    await self._register.withdraw(self.worker)
            await asyncio.sleep(HEALTH_EVERY)

    async def park(self) -> None:
        """Take it from the routers for as long as `unpark` is not called; it runs on by itself."""
        if self.parked:
            return
        self.parked = True
        if self.card is not None:
            self._draining = asyncio.create_task(self._register.drain(self.card), name=f"drain-{self.worker}")

    async def unpark(self) -> None:
        """Give it back to the routers."""
        if not self.parked:
            return
        self.parked = False
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)
            self._draining = None
        if self.card is not None:
            self.card = None
            await self._come()  # with a newer epoch: to the routers it is a new one

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
