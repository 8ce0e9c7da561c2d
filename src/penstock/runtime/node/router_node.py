"""Router node of one frontend process: the router machine, driven live, and everything that feeds it."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock import extension
from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.describe import measured_speed
from penstock.adapters.engines.http.engine_access import EngineAccesses
from penstock.adapters.seams import Store
from penstock.config.cluster_secret_file import secret_of_process
from penstock.config.live_knobs import SettingChange
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Nanos
from penstock.kernel.plurals import counted
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import WorkerCard
from penstock.router.events import OperatorNote, PluginLeftOut, SettingsChanged, WorkerMeasured
from penstock.router.journal import router_book
from penstock.router.router import Router
from penstock.router.selection.router_plugins import PluginCandidates, PluginRequest
from penstock.router.status_rows import StatusFinding
from penstock.runtime.backends import Plane, open_plane, open_relayed, open_store
from penstock.runtime.cluster_state import refused_messages
from penstock.runtime.cluster_state.adapter_registry import AdapterRegistry
from penstock.runtime.cluster_state.crash_log import Crashes
from penstock.runtime.cluster_state.current_settings import CurrentSettings
from penstock.runtime.cluster_state.membership import Membership, RevokedLeases
from penstock.runtime.cluster_state.membership_ack import DrainProgress, MembershipAck
from penstock.runtime.cluster_state.placement_sync import FrontendCard, PlacementSync
from penstock.runtime.cluster_state.pool_statuses import PoolStatuses, desired_pools
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds
from penstock.runtime.kv_events.peer_blocks import PeerBlocksClient
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.loop_monitor import LoopMonitor
from penstock.runtime.node.adapter_loads import AdapterLoads
from penstock.runtime.node.node_status import NodeStatus
from penstock.runtime.node.tickets import Tickets
from penstock.runtime.node.worker_observers import WorkerObservers
from penstock.runtime.planning.planner_report import PlannerStatus
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.records.pod_run_folder import process_name

CALL_BUDGET, CANDIDATE_BUDGET = 1e-3, 1e-5
"""Seconds of a call, and more of them for each candidate: all else that a frontend does for a request takes 0.3 ms."""
OVERRUNS_MAX = 10
"""Calls beyond their budget, of the last `COUNTED` at most, after which a plug-in is left out: one of them may be the
machine's fault, which stops a process now and then."""
COUNTED = 1000
STALL = 0.5
"""Seconds after which one call is enough: every request of the process waited for it."""
log = logging.getLogger("penstock.node")
router_log = logging.getLogger("penstock.router")
JOURNAL_BATCH = 64
"""Events of the router that its journal encodes together, in about 0.6 ms; the rest waits for half a second at most."""
SETTLE_LIMIT = 5.0
"""Seconds that a starting frontend waits to learn the present workers."""


class PluginWatch:
    """Calls plug-ins for one router.

    Args:
        post: gives the router an event.
        clock: seconds, any origin.
    """

    def __init__(self, post: Callable[[PluginLeftOut], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._post, self._clock = post, clock
        self._overruns: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def call(
        self,
        name: str,
        count: int,
        method: Callable[[PluginRequest, Any], Any],
        request: PluginRequest,
        candidates: PluginCandidates,
    ) -> Any:
        """Call a plug-in with ``count`` candidates, and enter how long it took."""
        began = self._clock()
        try:
            return method(request, candidates)
        finally:
            self._enter(name, self._clock() - began, CALL_BUDGET + count * CANDIDATE_BUDGET)

    def _enter(self, name: str, took: float, budget: float) -> None:
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if calls % COUNTED == 0:
            self._overruns[name] = 0
        if took <= budget:
            return
        overruns = self._overruns[name] = self._overruns.get(name, 0) + 1
        if took >= STALL:
            self._post(PluginLeftOut(name=name, reason=f"one call took {took:.2f} s"))
        elif overruns >= OVERRUNS_MAX:
            times = f"the last one took {took * 1e3:.1f} ms, {budget * 1e3:.1f} ms are allowed"
            text = f"{overruns} of its calls took too long: {times}"
            self._post(PluginLeftOut(name=name, reason=text))


class RouterNode:
    """One router and its connections; `open_node` makes it, `close` ends it."""

    def __init__(
        self, settings: ClusterSettings, run: Path, index: int, store: Store, secret: ClusterSecret | None = None
    ) -> None:
        self.settings = settings
        self.run = run
        self.name = process_name(index)
        self.router = Router(
            settings.routing,
            slo=settings.slo,
            name=self.name,
            seed=secrets.randbits(63),  # numbers of hand-offs must not repeat, in other processes and after a restart
            shared=settings.frontend.processes > 1,
        )
        self.journal: JournalWriter | None = None
        if settings.runs.journal:
            self.journal = JournalWriter(
                run / "journal" / self.name,
                router_book(self.router),
                wall_ns=time.time_ns(),
                batch=JOURNAL_BATCH,
            )
            self.journal.begin(0)
        self.live = LiveDriver({"router": self.router}, watch=None if self.journal is None else self.journal.watch)
        if self.router.plugins is not None:
            self.router.plugins.call = PluginWatch(partial(self.live.post, "router")).call
        self.tickets = Tickets(self.live)
        self.secret = secret
        peers = PeerBlocksClient(store, self.name, secret)
        self.feeds = KvEventFeeds(self.live, secret, open_relayed(settings, self.name, secret), peers)
        self.store = store
        self.departures = DrainProgress(store, self.router, self.name, settings.discovery.ttl)
        self.membership = Membership(
            store,
            self.live,
            started=self._worker_started,
            stopped=self._worker_went,
            leaving=self.departures.began,
            heard=self._heard,
        )
        self.acquaintance = MembershipAck(store, self.name, lambda: self.membership.cards, settings.discovery.ttl)
        self.accesses = EngineAccesses(settings.models)
        http = self.accesses.session
        self._http = http()
        self.observers = WorkerObservers(settings, self.live, self.router, self.name, http)
        self.adapters = AdapterLoads(self.live, self.router, AdapterRegistry(settings), http())
        self.crashes = Crashes(store)
        self.pool_statuses = PoolStatuses(store)
        self.planned = PlannerStatus(store, lambda: self.settings.planner.enabled)
        self.loop_monitor = LoopMonitor()
        self.peers: PlacementSync | None = None
        self.plane: Plane | None = None
        self.tuning = CurrentSettings(store, settings, self._tuned)
        self.on_settings: Callable[[ClusterSettings], None] = lambda settings: None
        """Called with the settings whenever an operator changed some."""
        self.noted: dict[str, int] = {}
        """How often each kind of `OperatorNote` came."""
        self._tasks = BackgroundTasks()
        self.live.on(OperatorNote, self._noted)

    async def settled(self) -> None:
        """Wait until workers and changed settings are known, but not for long: a store that fails stops no traffic."""
        try:
            async with asyncio.timeout(SETTLE_LIMIT):
                await self.tuning.read.wait()
                await self.membership.read.wait()
        except TimeoutError:
            log.warning("the store says nothing, so this frontend starts without workers")

    async def announce(self, url: str, page: str, admin_url: str) -> None:
        """Write where this frontend listens into the store, and connect to the other frontends.

        Args:
            page: URL of the admin routes for people; ``admin_url``: URL where they are this process's alone.
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
        self.peers = PlacementSync(self.store, self.live, self.plane, card, self.settings.discovery.ttl)
        await self.peers.announce()
        self._tasks.spawn(self.peers.run(), "peers")
        # From here on requests come; blocks of the loop during the start delayed none.
        self._tasks.spawn(self.loop_monitor.run(), "loop-monitor")

    @property
    def message_sources(self) -> refused_messages.MessageSources:
        return refused_messages.MessageSources(self.store, self.plane, self.peers, self.membership, self.feeds)

    def status(self) -> NodeStatus:
        """Return the router's status with the observations of the parts around it."""
        status = self.router.status(self.live.now())
        self.observers.describe(status)
        self.crashes.describe(status.workers)
        if not self.membership.available:
            frozen = counted(len(self.membership.cards), "worker")
            text = f"the store can't be read: membership is frozen at {frozen}"
            hint = "traffic goes on; see the frontend's log for the reason"
            status.findings.append(StatusFinding("warning", text, hint))
        status.findings += refused_messages.findings(self.message_sources)
        status.findings += self.feeds.findings()
        status.findings += self.crashes.findings()
        status.findings += self.planned.findings()
        status.findings += self.pool_statuses.findings()
        others = [] if self.peers is None else [card.id for card in self.peers.cards.values()]
        return NodeStatus(
            **msgspec.structs.asdict(status),
            pools=desired_pools(self.pool_statuses.known),
            crashes=self.crashes.status(),
            frontends=sorted([self.name, *others]),
            planner=self.planned.report,
            router_faults=self.live.faults,
        )

    async def close(self) -> None:
        """Stop receiving events and delete this frontend's keys in the store."""
        await self._tasks.close()
        await self.departures.close()
        await self.observers.close()
        await self.adapters.close()
        await self.feeds.close()
        await self._http.close()
        if self.plane is not None:
            await self.plane.close()
        await self.store.close()
        self.live.close()

    def start(self) -> None:
        self._tasks.spawn(self.membership.run(), "membership")
        self._tasks.spawn(self.acquaintance.run(), "acquaintance")
        self._tasks.spawn(self.tuning.run(), "tuning")
        self._tasks.spawn(self.observers.run(), "observers")
        self._tasks.spawn(self.planned.run(), "planned")
        self._tasks.spawn(self.crashes.run(), "crashes")
        self._tasks.spawn(self.pool_statuses.run(), "pools")
        self._tasks.spawn(self.adapters.registry.run(self.store), "adapters")
        self._tasks.spawn(self.adapters.run(self._leads), "adapter-workers")

    def _leads(self) -> bool:
        """Return whether this frontend decides what only one may: of those that are known, the first by name."""
        return self.peers is not None and all(self.name < card.id for card in self.peers.cards.values())

    def also(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task for as long as this node runs."""
        self._tasks.spawn(work, name)

    def _worker_started(self, card: WorkerCard) -> None:
        try:
            self.accesses.enter_card(card)
        except ConfigError as error:
            log.error("requests to %s go without its key: %s", card.id, error)
        if self.router.pools[card.model].index.exact is not None:
            self.feeds.start(card)
        self.observers.start(card)
        self.adapters.start(card)
        if self.settings.router.cost.kind == "latency":
            self._tasks.spawn(self._measure(card))

    def _tuned(self, settings: ClusterSettings, changes: Sequence[SettingChange], by: str) -> None:
        before, self.settings = self.settings, settings
        if (settings.routing, settings.slo) != (before.routing, before.slo):
            keys = tuple(change.key for change in changes)
            self.live.post("router", SettingsChanged(settings=settings.routing, slo=settings.slo, keys=keys, by=by))
        if settings.router.cost.kind == "latency" and before.router.cost.kind != "latency":
            for card in self.membership.cards:
                self._tasks.spawn(self._measure(card))
        self.on_settings(settings)

    def _heard(self) -> None:
        self.acquaintance.changed()

    async def _worker_went(self, card: WorkerCard) -> None:
        await self.departures.ended(card)
        self.observers.stop(card)
        self.adapters.stop(card)
        await self.feeds.stop(card)

    async def _measure(self, card: WorkerCard) -> None:
        speed = await measured_speed(self._http.session, card.url)
        if speed is None and extension.offers("speeds", "card"):
            speed = await asyncio.to_thread(extension.entry("speeds", "card"), self.settings, card)
        if speed is not None:
            self.live.post("router", WorkerMeasured(worker=card.id, **speed))

    def _noted(self, now: Nanos, sender: str, effect: OperatorNote) -> None:
        self.noted[effect.kind] = self.noted.get(effect.kind, 0) + 1
        level = logging.INFO if effect.kind.startswith("worker_") else logging.WARNING
        router_log.log(level, effect.text, extra={"fields": {"kind": effect.kind, **effect.fields}})


async def open_node(settings: ClusterSettings, run: Path, index: int) -> RouterNode:
    """Open a frontend's node over the cluster's store; it starts to follow workers at once."""
    secret = secret_of_process(settings, run)
    revoked = RevokedLeases()
    store = open_store(settings, run, secret, revoked=revoked.add)
    node = RouterNode(settings, run, index, store, secret)
    node.start()
    node.also(revoked.run(store), "revoked")
    return node
