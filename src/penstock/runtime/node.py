"""What stands behind one frontend process? The router machine, driven live, and everything that feeds it."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from penstock.adapters.engines.describe import measured_speed
from penstock.adapters.seams import Store
from penstock.config.cluster import ClusterSettings
from penstock.config.live import Change
from penstock.config.secret import secret_of_process
from penstock.kernel.machine import Nanos
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import WorkerCard
from penstock.router.events import Noted, SettingsChanged, WorkerMeasured
from penstock.router.router import Router
from penstock.runtime import trust
from penstock.runtime.feeds import Feeds
from penstock.runtime.journal import Journal
from penstock.runtime.leaving import Departures
from penstock.runtime.live import Live
from penstock.runtime.loop_monitor import LoopMonitor
from penstock.runtime.membership import Membership
from penstock.runtime.observers import Observers
from penstock.runtime.opening import Plane, open_plane, open_relayed, open_store
from penstock.runtime.peers import FrontendCard, Peers
from penstock.runtime.planning.planned import Planned
from penstock.runtime.revoked import Revoked
from penstock.runtime.seen import Acquaintance
from penstock.runtime.tickets import Tickets
from penstock.runtime.tuning import Tuning

log = logging.getLogger("penstock.node")
router_log = logging.getLogger("penstock.router")

SETTLE_LIMIT = 5.0
"""Seconds that a starting frontend waits to hear who is there."""


class Node:
    """One router and its connections; `open_node` makes it, `close` ends it."""

    def __init__(
        self, settings: ClusterSettings, run: Path, index: int, store: Store, secret: ClusterSecret | None = None
    ) -> None:
        self.settings = settings
        self.run = run
        self.name = f"frontend-{index}-{os.getpid()}"
        self.router = Router(settings.routing, name=self.name, seed=index, shared=settings.frontend.processes > 1)
        self.journal: Journal | None = None
        if settings.runs.journal:
            self.journal = Journal(
                run / "journal" / self.name,
                self.router,
                wall_ns=time.time_ns(),
                segment_bytes=settings.runs.journal_segment,
                segments=settings.runs.journal_segments,
            )
            self.journal.begin(0)
        self.live = Live({"router": self.router}, watch=None if self.journal is None else self.journal.watch)
        self.tickets = Tickets(self.live)
        self.secret = secret
        self.feeds = Feeds(self.live, secret, open_relayed(settings, self.name, secret))
        self.store = store
        self.departures = Departures(store, self.router, self.name, settings.discovery.ttl)
        self.membership = Membership(
            store,
            self.live,
            started=self._worker_came,
            stopped=self._worker_went,
            leaving=self.departures.began,
            heard=self._heard,
        )
        self.acquaintance = Acquaintance(store, self.name, lambda: self.membership.cards, settings.discovery.ttl)
        self.observers = Observers(settings, self.live, self.router, self.name)
        self.planned = Planned(store, lambda: self.settings.planner.enabled)
        self.loop_monitor = LoopMonitor()
        self.peers: Peers | None = None
        self.plane: Plane | None = None
        self.tuning = Tuning(store, settings, self._tuned)
        self.on_settings: Callable[[ClusterSettings], None] = lambda settings: None
        """Told the settings whenever an operator changed some."""
        self.noted: dict[str, int] = {}
        """How often each kind of `Noted` was said."""
        self._tasks: list[asyncio.Task[None]] = []
        self._measuring: set[asyncio.Task[None]] = set()
        self.live.on(Noted, self._noted)

    async def settled(self) -> None:
        """Wait until workers and changed settings are known, but not for long: a store that fails stops no traffic."""
        try:
            async with asyncio.timeout(SETTLE_LIMIT):
                await self.tuning.read.wait()
                await self.membership.read.wait()
        except TimeoutError:
            log.warning("the store says nothing, so this frontend starts without workers")

    async def announce(self, url: str, page: str, admin_url: str) -> None:
        """Say where this frontend listens, and get in touch with the other ones.

        Args:
            page: where a person finds the admin routes; ``admin_url``: where they are this process's alone.
        """
        self.plane = open_plane(self.settings, self.name, self.secret)
        card = FrontendCard(
            id=self.name,
            url=url,
            admin_url=admin_url,
            page=page,
            pid=os.getpid(),
            plane=getattr(self.plane, "endpoint", ""),
            run=str(self.run),
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
        found["findings"] += trust.findings(self)
        self.observers.describe(found["workers"])
        found["frontends"] = [] if self.peers is None else [card.id for card in self.peers.cards.values()]
        found["router_faults"] = self.live.faults
        found["planner"] = self.planned.status()
        found["findings"] += self.planned.findings()
        return found

    async def close(self) -> None:
        """Stop listening and leave the store."""
        for task in [*self._tasks, *self._measuring]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._measuring, return_exceptions=True)
        await self.departures.close()
        await self.observers.close()
        await self.feeds.close()
        if self.plane is not None:
            await self.plane.close()
        await self.store.close()
        self.live.close()

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self.membership.run(), name="membership"))
        self._tasks.append(asyncio.create_task(self.acquaintance.run(), name="acquaintance"))
        self._tasks.append(asyncio.create_task(self.tuning.run(), name="tuning"))
        self._tasks.append(asyncio.create_task(self.observers.run(), name="observers"))
        self._tasks.append(asyncio.create_task(self.planned.run(), name="planned"))

    def also(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Let something run for as long as this node does."""
        self._tasks.append(asyncio.create_task(work, name=name))

    def _worker_came(self, card: WorkerCard) -> None:
        if self.router.pools[card.model].exact is not None:
            self.feeds.start(card)
        self.observers.start(card)
        if self.settings.router.cost.kind == "latency":
            self._start_measuring(card)

    def _start_measuring(self, card: WorkerCard) -> None:
        task = asyncio.create_task(self._measure(card))
        self._measuring.add(task)
        task.add_done_callback(self._measuring.discard)

    def _tuned(self, settings: ClusterSettings, changes: Sequence[Change], by: str) -> None:
        before, self.settings = self.settings, settings
        if settings.routing != before.routing:
            keys = tuple(change.key for change in changes)
            self.live.post("router", SettingsChanged(settings=settings.routing, keys=keys, by=by))
        if settings.router.cost.kind == "latency" and before.router.cost.kind != "latency":
            for card in self.membership.cards:
                self._start_measuring(card)
        self.on_settings(settings)

    def _heard(self) -> None:
        self.acquaintance.changed()

    async def _worker_went(self, card: WorkerCard) -> None:
        await self.departures.ended(card)
        self.observers.stop(card)
        await self.feeds.stop(card)

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
    """Open a frontend's node over the cluster's store; it starts to follow workers at once."""
    secret = secret_of_process(settings, run)
    revoked = Revoked()
    store = open_store(settings, run, secret, revoked=revoked.add)
    node = Node(settings, run, index, store, secret)
    node.start()
    node.also(revoked.run(store), "revoked")
    return node
