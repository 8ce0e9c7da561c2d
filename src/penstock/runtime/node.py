"""What stands behind one frontend process? The router machine, driven live, and everything that feeds it."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import aiohttp

from penstock.adapters.engines.describe import measured_speed
from penstock.adapters.planes.zmq import ZmqPlane
from penstock.adapters.seams import Store
from penstock.adapters.stores.file import FileStore
from penstock.config.cluster import ClusterSettings
from penstock.kernel.machine import Nanos
from penstock.kernel.values import WorkerCard
from penstock.router.events import Noted, WorkerMeasured
from penstock.router.router import Router
from penstock.runtime.feeds import Feeds
from penstock.runtime.live import Live
from penstock.runtime.loop_monitor import LoopMonitor
from penstock.runtime.membership import Membership
from penstock.runtime.peers import FrontendCard, Peers
from penstock.runtime.tickets import Tickets

log = logging.getLogger("penstock.node")
router_log = logging.getLogger("penstock.router")


class Node:
    """One router and its connections; `open_node` makes it, `close` ends it."""

    def __init__(self, settings: ClusterSettings, run: Path, index: int, store: Store) -> None:
        self.settings = settings
        self.run = run
        self.name = f"frontend-{index}-{os.getpid()}"
        self.router = Router(settings.router, name=self.name, seed=index, shared=settings.frontend.processes > 1)
        self.live = Live({"router": self.router})
        self.tickets = Tickets(self.live)
        self.feeds = Feeds(self.live)
        self.store = store
        self.membership = Membership(store, self.live, started=self._worker_came, stopped=self.feeds.stop)
        self.loop_monitor = LoopMonitor()
        self.peers: Peers | None = None
        self.plane: ZmqPlane | None = None
        self.noted: dict[str, int] = {}
        """How often each kind of `Noted` was said."""
        self._tasks: list[asyncio.Task[None]] = []
        self._measuring: set[asyncio.Task[None]] = set()
        self.live.on(Noted, self._noted)

    async def announce(self, url: str, admin_url: str) -> None:
        """Say where this frontend listens, and get in touch with the other ones."""
        self.plane = ZmqPlane(self.name)
        card = FrontendCard(
            id=self.name, url=url, admin_url=admin_url, pid=os.getpid(), plane=self.plane.endpoint, run=str(self.run)
        )
        self.peers = Peers(self.store, self.live, self.plane, card, self.settings.discovery.ttl)
        await self.peers.announce()
        self._tasks.append(asyncio.create_task(self.peers.run(), name="peers"))
        # From here on requests come; what held the loop while it started up concerned nobody.
        self._tasks.append(asyncio.create_task(self.loop_monitor.run(), name="loop-monitor"))

    def status(self) -> dict[str, Any]:
        """Return the router's status with what the processes around it know."""
        found = self.router.status(self.live.now())
        if not self.membership.available:
            found["findings"].append(
                {
                    "level": "warning",
                    "text": f"the store can't be read: membership is frozen at {len(self.membership.cards)} workers",
                    "hint": "traffic goes on; see the frontend's log for the reason",
                }
            )
        found["frontends"] = [] if self.peers is None else [card.id for card in self.peers.cards.values()]
        found["router_faults"] = self.live.faults
        return found

    async def close(self) -> None:
        """Stop listening and leave the store."""
        for task in [*self._tasks, *self._measuring]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._measuring, return_exceptions=True)
        await self.feeds.close()
        if self.plane is not None:
            await self.plane.close()
        await self.store.close()
        self.live.close()

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self.membership.run(), name="membership"))

    def _worker_came(self, card: WorkerCard) -> None:
        if self.router.pools[card.model].exact is not None:
            self.feeds.start(card)
        if self.settings.router.cost.kind == "latency":
            task = asyncio.create_task(self._measure(card))
            self._measuring.add(task)
            task.add_done_callback(self._measuring.discard)

    async def _measure(self, card: WorkerCard) -> None:
        async with aiohttp.ClientSession() as http:
            found = await measured_speed(http, card.url)
        if found is not None:
            self.live.post("router", WorkerMeasured(worker=card.id, **found))

    def _noted(self, now: Nanos, sender: str, effect: Noted) -> None:
        self.noted[effect.kind] = self.noted.get(effect.kind, 0) + 1
        level = logging.INFO if effect.kind.startswith("worker_") else logging.WARNING
        router_log.log(level, effect.text, extra={"fields": {"kind": effect.kind, **effect.fields}})


async def open_node(settings: ClusterSettings, run: Path, index: int) -> Node:
    """Open a frontend's node over the run folder's file store; it starts to follow workers at once."""
    node = Node(settings, run, index, FileStore(run / "discovery"))
    node.start()
    return node
