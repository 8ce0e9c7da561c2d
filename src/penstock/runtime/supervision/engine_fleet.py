"""Engine fleet of one supervisor: its own engine processes and attached servers, announced to the routers.

An engine knows nothing of the cluster: the fleet reads its description and puts its card under ``workers/<id>``.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate
from penstock.adapters.connectors.gpu_inventory import inventory
from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.engines.describe import describe, healthy, lacking
from penstock.adapters.engines.dialects.kv_transfer_protocol import USUAL
from penstock.adapters.engines.launch import Launch, has_tier_process, launch_of
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.config.cluster_secret_file import SECRET_ENV, without_secrets
from penstock.config.settings.cache_settings import CacheSettings
from penstock.config.settings.cluster_settings import PoolSettings, SuperviseSettings
from penstock.fleet.events import Crashed, Forget, Spawn
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.fleet.journal import KIND, FleetBook
from penstock.kernel.errors import PenstockError
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import Pool, Replica, Role, WorkerCard, WorkerId
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.cluster_state.desired_state import PoolStatus
from penstock.runtime.cluster_state.membership import MembershipEntry, key_of
from penstock.runtime.cluster_state.membership_ack import acknowledged_by_all
from penstock.runtime.cluster_state.store_watch import RETRY
from penstock.runtime.kv_events.kv_event_relay import KvEventRelays
from penstock.runtime.kv_tiers.tier_children import TierChildren
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.supervision.fleet_driver import FleetDriver, RequestCount
from penstock.runtime.supervision.frontend_processes import FrontendProcesses
from penstock.runtime.supervision.requests_left import requests_left
from penstock.runtime.supervision.status_writer import Report, StatusWriter

log = logging.getLogger("penstock.fleet")

GPU_ENGINES = ("vllm", "llamacpp")
"""Kinds of engines that compute on GPUs where there are any."""
FLUSH_EVERY = 1.0
"""Seconds between two writes of the journal."""


class EngineFleet:
    """The engines of this machine and the servers that were attached by URL: `open`, `add_pool`, then `start`.

    Args:
        state: file in which it records its processes, owned by the caller.
        logs: folder for the engines' logs.
        ttl: seconds after which the cards go away when this process dies.
        env: of the engines; this process's own where it is not given. None of the cluster's secrets is passed on.
        secret: of the cluster, passed to simulated engines, which then publish KV events only to processes with it.
        host: address of this machine on which its engines listen.
        relays: for the engines' KV events, where the routers do not receive them directly; closed by `stop`.
        orphan_grace: seconds that engines outlive this process where it is killed.
        end: seconds that they then get to end by themselves.
        journal: folder of a run's journals; None writes none.
    """

    def __init__(
        self,
        store: Store,
        settings: SuperviseSettings,
        state: StateFile,
        *,
        logs: Path,
        ttl: float,
        env: Mapping[str, str] | None = None,
        secret: str | None = None,
        host: str = "127.0.0.1",
        relays: KvEventRelays | None = None,
        orphan_grace: float = 0.0,
        end: float = 30.0,
        journal: Path | None = None,
    ) -> None:
        self.changed = asyncio.Event()
        """Set when a pool differs from its last report."""
        self.crashes = CrashBook(store, ttl)
        self.frontends: FrontendProcesses | None = None
        """Those that a restart replaces, where this supervisor runs them."""
        self._store = store
        self._ttl = ttl
        self._secret = secret
        self._host = host
        self._relays = relays
        own = os.environ if env is None else env
        found = inventory(settings.gpus, own)
        self.driver = FleetDriver(
            settings,
            state,
            self,
            logs=logs,
            gpus=GpuAllocator.over(found.gpus, found.source),
            env=without_secrets(own),
            orphan_grace=orphan_grace,
            end_grace=end,
        )
        self._journal: JournalWriter | None = None
        if journal is not None:
            folder = journal / f"{KIND}-{os.getpid()}"
            self._journal = JournalWriter(folder, FleetBook(self.driver.fleet), wall_ns=time.time_ns())
            self._journal.begin(0)
        self.driver.watched = self._watched
        self._caches: dict[str, CacheSettings] = {}
        """Of pools whose engines have a tier process each."""
        self._tiers = TierChildren(
            settings,
            state.path.parent,
            state.namespace,
            logs=logs,
            env={**without_secrets(own), **({} if secret is None else {SECRET_ENV: secret})},
            host=host,
            crashes=self.crashes,
        )
        self._statuses = StatusWriter(store, ttl)
        self._tasks: list[asyncio.Task[None]] = []
        self._cards: dict[str, WorkerCard] = {}
        self._epoch = 0
        self._http: aiohttp.ClientSession | None = None

    def use(self, settings: SuperviseSettings) -> None:
        """Use these settings from now on."""
        self._tiers.settings = settings
        self.driver.use(settings)

    def post(self, event: Event) -> None:
        """Tell the fleet what is desired."""
        self.driver.post(event)

    async def open(self) -> None:
        """Find the engines that a killed supervisor left running."""
        await self.driver.open()

    def add_pool(self, model: str, name: str, pool: PoolSettings, *, prefix: str = "") -> list[WorkerId]:
        """Run a pool's engines, or follow its URLs, from `start` on; return their ids.

        Raises:
            ConfigError: the machine has too few GPUs.
        """
        base = f"{prefix}{name}"
        configured = Pool(model=model, role=pool.role, desired=len(pool.urls) or pool.replicas)
        if not pool.urls:
            gpus = pool.gpus
            if gpus is None:
                gpus = int(pool.engine in GPU_ENGINES and bool(self.driver.fleet.state.gpus.all))
            template = EngineTemplate(base, self._launcher(model, pool), gpus)
            if has_tier_process(pool):
                self._caches[base] = pool.cache
            configured = msgspec.structs.replace(configured, gpus=max(1, gpus))
            return [WorkerId(worker) for worker in self.driver.add(base, template, configured)]
        servers = [
            EngineProcess(f"{base}-{n}", base, url, None, overrides_of(pool, url)) for n, url in enumerate(pool.urls)
        ]
        return [WorkerId(worker) for worker in self.driver.attach(base, configured, servers)]

    async def start(self) -> None:
        """Start what is missing."""
        await self.driver.start()
        for work, name in (
            (self._watch(), "fleet"),
            (self.crashes.run(), "crashes"),
            (self._statuses.run(), "statuses"),
            (self._flush(), "fleet journal"),
        ):
            self._tasks.append(asyncio.create_task(work, name=name))

    async def ready(self) -> None:
        """Wait until every engine served for the first time, or failed to.

        Raises:
            PenstockError: an engine could not be started, or a server not reached; the message says which and why.
        """
        await self.driver.ready()

    async def stop(self, *, at_once: bool = False) -> None:
        """Take every worker out of the store, then end the processes; attached servers keep running."""
        await self.driver.freeze()
        for worker in list(self._cards):
            await self.withdraw(worker)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._relays is not None:
            await self._relays.close()
        await self.driver.close(at_once=at_once)
        await self._tiers.stop()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.flush)
        if self._http is not None:
            await self._http.close()

    def reports(self) -> dict[str, PoolStatus]:
        """Return every pool as it is now, by its name."""
        fleet = self.driver.fleet
        statuses = {}
        for name, pool in fleet.pools().items():
            replicas = tuple(self._with_role(replica) for replica in pool.replicas or ())
            kind: Literal["urls", "process"] = "urls" if fleet.state.pools[name].attached else "process"
            statuses[name] = PoolStatus(pool=msgspec.structs.replace(pool, replicas=replicas), kind=kind)
        return statuses

    @property
    def workers(self) -> int:
        """Number of workers that serve now."""
        return len(self._cards)

    # --- hooks of the driver ------------------------------------------------------------------------------------------

    async def answers(self, url: str) -> bool:
        return await healthy(self._client(), url)

    async def missing(self, url: str) -> str | None:
        return await lacking(self._client(), url)

    async def publish(self, engine: EngineProcess, role: Role, *, draining: bool) -> None:
        """Write a worker's entry. One that is known gets a newer card, with another role or to take requests again.

        To the routers such a worker is a new one: what they know of it, except its KV events, is of its former card.
        """
        known = self._cards.get(engine.worker)
        if known is None:
            card = await self._describe(engine, role)
        elif draining:
            card = known
        else:
            handoff = known.handoff or USUAL.get(known.engine) if known.role != role else known.handoff
            card = msgspec.structs.replace(
                known, role=role, epoch=self._newer_epoch(), started_epoch=known.incarnation, handoff=handoff
            )
            if known.role != role:
                log.info("%s is %s now, and was %s", engine.worker, role, known.role)
        await self._announce(card, draining=draining)

    async def acknowledged(self, worker: str) -> None:
        card = self._cards.get(worker)
        if card is not None:
            await acknowledged_by_all(self._store, card)

    def requests_left(self, worker: str) -> AsyncIterator[RequestCount]:
        return requests_left(self._store, self._cards[worker])

    async def withdraw(self, worker: str) -> None:
        if self._cards.pop(worker, None) is None:
            return
        self.changed.set()
        if self._relays is not None:
            self._relays.remove(worker)
        try:
            await self._store.delete(key_of(WorkerId(worker)))
        except PenstockError as error:
            log.warning("worker %s could not be taken out of the store: %s", worker, error)

    async def replace_frontend(self, index: int) -> None:
        assert self.frontends is not None
        await self.frontends.replace(index)

    def crashed(self, crash: Crashed) -> None:
        self.crashes.add(crash.worker, crash.kind, crash.reason)

    def report(self, report: Report) -> None:
        self._statuses.add(report)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _launcher(self, model: str, pool: PoolSettings) -> Callable[[str, int, Sequence[int]], Launch]:
        def launch(worker: str, port: int, gpus: Sequence[int]) -> Launch:
            if pool.engine != "sim":
                tiers = self._tiers.socket(worker) if has_tier_process(pool) else None
                return launch_of(worker, model, pool, port=port, gpus=gpus, host=self._host, tiers=tiers)
            # A simulated engine reports its port, and is trusted with the cluster's secret.
            made = launch_of(worker, model, pool, port=0, gpus=gpus, host=self._host)
            secret = {} if self._secret is None else {SECRET_ENV: self._secret}
            return msgspec.structs.replace(made, env={**made.env, **secret})

        return launch

    def _watched(self, now: Nanos, machine: str, event: Event, effects: Sequence[Effect]) -> None:
        """Start a tier process with its engine, and end it once that is gone for good: it outlives restarts."""
        if self._journal is not None:
            self._journal.watch(now, machine, event, effects)
        for effect in effects:
            if isinstance(effect, Spawn) and effect.pool in self._caches:
                self._tiers.begin(effect.worker, self._caches[effect.pool], effect.number)
            elif isinstance(effect, Forget) and effect.pool in self._caches:
                self._tiers.end(effect.worker)

    async def _describe(self, engine: EngineProcess, role: Role) -> WorkerCard:
        # A restarted engine must be newer than its former self, also after a restart of this process.
        configured = self.driver.fleet.state.pools[engine.pool].configured
        known = {**engine.card, "pid": engine.pid}
        if role != configured.role:
            known["role"] = role
        overrides = {key: value for key, value in known.items() if value is not None}
        epoch = self._newer_epoch()
        worker = WorkerId(engine.worker)
        return await describe(
            self._client(), engine.url, worker=worker, epoch=epoch, model=configured.model, overrides=overrides
        )

    def _newer_epoch(self) -> int:
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        return self._epoch

    async def _announce(self, card: WorkerCard, *, draining: bool) -> None:
        entry = MembershipEntry(card=card if self._relays is None else self._relays.announced(card), draining=draining)
        while True:
            try:
                await self._store.put(key_of(card.id), msgspec.json.encode(entry), ttl=self._ttl)
                break
            except StoreUnavailable as error:
                log.warning("the entry of %s can't be written to the store: %s", card.id, error)
                await asyncio.sleep(RETRY)  # until the fleet wants something else of it
        self._cards[card.id] = card
        self.changed.set()

    def _with_role(self, replica: Replica) -> Replica:
        """Return a replica with the role that its card says: a server may know it better than its pool."""
        card = self._cards.get(replica.id)
        return msgspec.structs.replace(replica, role=None if card is None else card.role)

    async def _flush(self) -> None:
        while self._journal is not None:
            await asyncio.sleep(FLUSH_EVERY)
            await asyncio.to_thread(self._journal.flush)

    async def _watch(self) -> None:
        async for _ in self.driver.watch():
            self.changed.set()

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http
