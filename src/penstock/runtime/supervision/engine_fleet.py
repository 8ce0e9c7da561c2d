"""Engine fleet of one supervisor: its own engine processes and attached servers, announced to the routers.

An engine knows nothing of the cluster: the fleet reads its description and puts its card under ``workers/<id>``.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from penstock import extension
from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate, LaunchSpec
from penstock.adapters.connectors.engine_runner import EngineRunner
from penstock.adapters.connectors.gpu_inventory import inventory
from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.engines.describe import ServerHealth, describe, health, lacking
from penstock.adapters.engines.dialects.kv_transfer_protocol import USUAL
from penstock.adapters.engines.http.engine_access import EngineAccesses, key_env
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.engines.launch import Launch, launch_of
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.adapters.engines.sleep_mode import put_to_sleep, wake
from penstock.adapters.process_life import SIBLING_ENV
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.config.cluster_secret_file import SECRET_ENV, without_secrets
from penstock.config.settings.cluster_settings import ModelSettings, PoolSettings, SuperviseSettings
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.fleet.events import Crashed, Forget, Recalled, Spawn
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.fleet.journal import KIND, fleet_book
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import Pool, Replica, Role, WorkerCard, WorkerId
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.cluster_state.desired_state import PoolStatus
from penstock.runtime.cluster_state.membership import WORKERS, MembershipEntry, entry_of, key_of
from penstock.runtime.cluster_state.membership_ack import acknowledged_by_all, acks_in
from penstock.runtime.cluster_state.store_watch import RETRY
from penstock.runtime.kv_events.kv_event_relay import KvEventRelays
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.supervision.child_process import EngineChildren, EngineSite
from penstock.runtime.supervision.fleet_driver import FleetDriver, RequestCount, Runner, Strategy
from penstock.runtime.supervision.status_writer import Report, StatusWriter, reports_in, requests_left

log = logging.getLogger("penstock.fleet")

GPU_ENGINES = ("vllm", "sglang", "trtllm", "llamacpp")
"""Kinds of engines that compute on GPUs where there are any."""
CHECKS_KEEP_ALIVE = 30.0
"""Seconds: above those between two checks of one of 500 servers, so that the second needs no new connection where the
server keeps the old one."""
FLUSH_EVERY = 1.0
"""Seconds between two writes of the journal."""
Launcher = Callable[[str, int, Sequence[int]], LaunchSpec]
"""How to start an engine: from its id, a free port and its GPUs."""


class EngineHost(NamedTuple):
    """Where a fleet's engines run, where that is not this machine.

    ``launcher``: from a pool's model, name and settings. ``strategies``: of pools that have one of their own. Cards of
    its engines have no lease: they outlive this process, as the engines do.
    """

    runner: Runner
    gpus: GpuAllocator
    launcher: Callable[[str, str, PoolSettings], Launcher]
    strategies: Mapping[str, Strategy] = {}


class Frontends(Protocol):
    """The frontends of a cluster, as far as a supervisor drains and replaces them."""

    @property
    def indices(self) -> range: ...

    async def park(self, index: int) -> bool:
        """Drain one frontend and do not start it again; return whether it ended by itself."""
        ...

    async def unpark(self, index: int) -> None:
        """Start a parked frontend again."""
        ...

    async def replace(self, index: int) -> None:
        """Replace a frontend without losing a request.

        Raises:
            PenstockError: its successor does not come up.
        """
        ...


class FollowedServers(Protocol):
    """A pool's servers while they come and go; `run` until cancelled."""

    async def run(self) -> None: ...

    async def read(self) -> None:
        """Wait until those that there are were read.

        Raises:
            PenstockError: they can't be.
        """
        ...


class ServerSource(Protocol):
    """Where the servers of pools with a selector are found: an entry of the seam ``source`` makes one."""

    def follow(self, driver: FleetDriver, name: str, settings: PoolSettings, configured: Pool) -> FollowedServers: ...

    async def close(self) -> None: ...


class EngineFleet:
    """The engines of this machine and the servers that were attached by URL: `open`, `add_pool`, then `start`.

    Args:
        state: file in which it records its processes, owned by the caller; None where they run elsewhere.
        logs: folder for the engines' logs.
        ttl: seconds after which the cards go away when this process dies.
        env: of the engines; this process's own where it is not given. None of the cluster's secrets is passed on.
        secret: of the cluster, passed to simulated engines, which then publish KV events only to processes with it.
        host: address of this machine on which its engines listen.
        relays: for the engines' KV events, where the routers do not receive them directly; closed by `stop`.
        orphan_grace: seconds that engines outlive this process where it is killed.
        end: seconds that they then get to end by themselves.
        journal: folder of a run's journals; None writes none.
        elsewhere: where the engines run; None is this machine.
        kubernetes: API server of the pods that pools with a selector follow.
        access_env: environment that `PoolSettings.access` names variables of; this process's own where it is not given.
    """

    def __init__(
        self,
        store: Store,
        settings: SuperviseSettings,
        state: StateFile | None,
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
        elsewhere: EngineHost | None = None,
        kubernetes: KubernetesSettings | None = None,
        access_env: Mapping[str, str] = os.environ,
    ) -> None:
        self.changed = asyncio.Event()
        """Set when a pool differs from its last report."""
        self.crashes = CrashBook(store, ttl)
        self.frontends: Frontends | None = None
        """Those that a restart replaces, where this supervisor runs them."""
        self.recalled: set[str] = set()
        """Workers whose entries were taken over from an earlier process."""
        self._store = store
        self._acks, self._reports = acks_in(store), reports_in(store)
        self._ttl = ttl
        self._secret = secret
        self._host = host
        self._relays = relays
        self._elsewhere = elsewhere
        own = os.environ if env is None else env
        self._children: list[EngineChildren] = []
        """Kinds of processes beside the engines of this machine."""
        if elsewhere is None:
            assert state is not None
            elsewhere = self._here(settings, state, logs, own, grace=orphan_grace, end=end)
        self.driver = FleetDriver(settings, elsewhere.runner, self, gpus=elsewhere.gpus)
        self._launcher = elsewhere.launcher
        self._journal: JournalWriter | None = None
        if journal is not None:
            folder = journal / f"{KIND}-{os.getpid()}"
            self._journal = JournalWriter(folder, fleet_book(self.driver.fleet), wall_ns=time.time_ns())
            self._journal.begin(0)
        self.driver.watched = self._watched
        self.statuses = StatusWriter(store, ttl)
        self._kubernetes = KubernetesSettings() if kubernetes is None else kubernetes
        self._source: ServerSource | None = None
        self._followed: list[FollowedServers] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._cards: dict[str, WorkerCard] = {}
        self._epoch = 0
        self._accessed: dict[str, tuple[str, str]] = {}
        """Fleet's pool -> model and pool of the settings, where its engines do not serve everybody."""
        self._models: dict[str, ModelSettings] = {}
        self._accesses = EngineAccesses(self._models, access_env)
        self._http = self._accesses.session()
        self._calls = Http1Client(keep_alive=CHECKS_KEEP_ALIVE, access=self._accesses.at)
        """For the checks of health, which are many."""

    def _here(
        self,
        settings: SuperviseSettings,
        state: StateFile,
        logs: Path,
        own: Mapping[str, str],
        *,
        grace: float,
        end: float,
    ) -> EngineHost:
        """Return this machine as the place of the engines."""
        available = inventory(settings.gpus, own)
        env = without_secrets(own)
        runner = EngineRunner(settings, state, logs=logs, env=env, grace=grace, end=end)
        site = EngineSite(
            settings=lambda: runner.settings,
            state=state.path.parent,
            namespace=state.namespace,
            logs=logs,
            env={**env, **({} if self._secret is None else {SECRET_ENV: self._secret})},
            host=self._host,
            crashes=self.crashes,
            store=self._store,
            ttl=self._ttl,
        )
        self._children = [children(site) for children in extension.entries("child").values()]
        return EngineHost(runner, GpuAllocator.over(available.gpus, available.source), self._launcher_here)

    def use(self, settings: SuperviseSettings) -> None:
        """Use these settings from now on."""
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
            ConfigError: the machine has too few GPUs, or there is no login at an API server for a pool with a selector.
        """
        base = f"{prefix}{name}"
        configured = Pool(model=model, role=pool.role, desired=pool.size)
        if pool.access.any:
            self._accessed[base] = (model, name)
            pools = self._models[model].pools if model in self._models else {}
            self._models[model] = ModelSettings(pools={**pools, name: pool})
            self._accesses.of_pool(model, name)  # what can't be read is an error of the start
        if pool.selector is not None:
            if self._source is None:
                source = extension.entry("source", "kubernetes", f"models.{model}.pools.{name}.selector")
                self._source = source(self._kubernetes)
            self._followed.append(self._source.follow(self.driver, base, pool, configured))
            return []
        if not pool.urls:
            gpus = pool.gpus
            if gpus is None:
                gpus = int(pool.engine in GPU_ENGINES and bool(self.driver.fleet.state.gpus.all))
            if pool.sleeping and self._elsewhere is not None:
                raise ConfigError(
                    f"pool {base}: sleeping is {pool.sleeping}, and a pod keeps its GPUs while its engine sleeps",
                    hint="set sleeping to 0: replicas sleep only where penstock up starts them",
                )
            for children in self._children:
                children.add(base, model, pool)
            template = EngineTemplate(base, self._launcher(model, name, pool), gpus)
            configured = msgspec.structs.replace(configured, gpus=max(1, gpus))
            # In pods that is the kubelet's to do.
            health = pool.health.limits if self._elsewhere is None else None
            strategy = Strategy() if self._elsewhere is None else self._elsewhere.strategies.get(name, Strategy())
            added = self.driver.add(
                base, template, configured, sleeping=pool.sleeping, health=health, strategy=strategy
            )
            return [WorkerId(worker) for worker in added]
        servers = [
            EngineProcess(f"{base}-{n}", base, url, None, overrides_of(pool, url)) for n, url in enumerate(pool.urls)
        ]
        return [WorkerId(worker) for worker in self.driver.attach(base, configured, servers, pool.health.limits)]

    async def start(self) -> None:
        """Start what is missing."""
        for children in self._children:
            children.begin()
        await self.driver.start()
        for work, name in (
            (self._watch(), "fleet"),
            (self.crashes.run(), "crashes"),
            (self.statuses.run(), "statuses"),
            (self._flush(), "fleet journal"),
        ):
            self._tasks.append(asyncio.create_task(work, name=name))
        for followed in self._followed:
            self._tasks.append(asyncio.create_task(followed.run(), name="followed servers"))

    async def ready(self) -> Mapping[str, str]:
        """Wait until every engine served for the first time, or failed to, and every ready pod is known.

        Returns: attached servers that do not answer, each with its reason; they are taken in when they come.

        Raises:
            PenstockError: an engine could not be started, or nobody serves; the message says which and why.
        """
        for followed in self._followed:
            await followed.read()
        return await self.driver.ready()

    async def recall(self) -> None:
        """Take over the entries of engines that were adopted, and delete those of ended ones: a card is of one life."""
        lives = self.driver.fleet.state.lives
        found = [(key, entry_of(raw)) for key, raw in (await self._store.list(WORKERS)).items()]
        entries = {key: entry for key, entry in found if entry is not None}
        self.driver.add_leftovers([entry.card for entry in entries.values()])
        for key, entry in entries.items():
            card = entry.card
            life = lives.get(card.id)
            if life is not None and life.adopted:
                self._cards[card.id] = card
                self.recalled.add(card.id)
                self.post(Recalled(worker=card.id, role=card.role, draining=entry.draining))
            elif life is not None or self._of_mine(card.id):
                await self._store.delete(key)

    async def leave(self) -> None:
        """Stop to supervise: engines and their entries stay for the next process."""
        await self.driver.freeze()
        await self._end_tasks()

    async def stop(self, *, at_once: bool = False) -> None:
        """Take every worker out of the store, then end the processes; attached servers keep running."""
        await self.driver.freeze()
        for worker in list(self._cards):
            await self.withdraw(worker)
        await self._end_tasks(at_once=at_once, engines=True)

    async def _end_tasks(self, *, engines: bool = False, at_once: bool = False) -> None:
        await cancel_all(self._tasks)
        await self._acks.close()
        await self._reports.close()
        if self._relays is not None:
            await self._relays.close()
        if engines:
            await self.driver.close(at_once=at_once)
        for children in self._children:
            await children.stop()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.flush)
        await self._http.close()
        await self._calls.close()
        if self._source is not None:
            await self._source.close()

    def reports(self) -> dict[str, PoolStatus]:
        """Return every pool as it is now, by its name; of pools that are no more only those with replicas."""
        fleet = self.driver.fleet
        statuses = {}
        for name, pool in fleet.pools().items():
            replicas = tuple(self._with_role(replica) for replica in pool.replicas or ())
            if name in self.driver.leftovers and not replicas:
                continue
            kind: Literal["urls", "process"] = "urls" if fleet.state.pools[name].attached else "process"
            statuses[name] = PoolStatus(pool=msgspec.structs.replace(pool, replicas=replicas), kind=kind)
        return statuses

    def surge(self, pool: str) -> int:
        """Return how many replicas a pool has above the desired ones, while a restart replaces some."""
        return self.driver.fleet.state.pools[pool].surge

    @property
    def workers(self) -> int:
        """Number of workers that serve now."""
        return len(self._cards)

    # --- hooks of the driver ------------------------------------------------------------------------------------------

    async def health(self, engine: EngineProcess, timeout: float, model: str) -> ServerHealth:
        card, settings = self._cards.get(engine.worker), self._enter(engine.pool, engine.url)
        return await health(self._calls, engine.url, timeout, model, settings, card=card)

    async def mark_silent(self, worker: str, *, silent: bool, draining: bool) -> None:
        card = self._cards.get(worker)
        if card is not None:
            await self._announce(card, draining=draining, silent=silent)

    async def missing(self, pool: str, url: str) -> str | None:
        return await lacking(self._http.session, url, self._enter(pool, url))

    async def sleep(self, engine: EngineProcess) -> None:
        self._enter(engine.pool, engine.url)
        await put_to_sleep(self._http.session, engine.url)

    async def wake(self, engine: EngineProcess) -> None:
        self._enter(engine.pool, engine.url)
        await wake(self._http.session, engine.url)

    async def publish(self, engine: EngineProcess, role: Role, *, draining: bool) -> None:
        """Write a worker's entry. One that is known gets a newer card, with another role or to take requests again.

        To the routers such a worker is a new one: what they know of it, except its KV events, is of its former card.
        """
        known = self._cards.get(engine.worker)
        # A card has its address without a slash at the end, which an attached URL may have.
        if known is None or not (draining or known.url == engine.url.rstrip("/")):
            card = await self._describe(engine, role)
        elif draining:
            card = known
        else:
            role = known.role if known.fixed_role else role
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
            await acknowledged_by_all(self._acks, card)

    def requests_left(self, worker: str) -> AsyncIterator[RequestCount]:
        return requests_left(self._reports, self._cards[worker])

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
        self.statuses.add(report)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _enter(self, pool: str, url: str) -> str:
        """Know a server's pool, and return the dotted name of its settings."""
        model, name = self._accessed.get(pool, (self.driver.fleet.state.pools[pool].configured.model, None))
        self._accesses.enter(url, model, name)
        return f"models.{model}.pools.{name or pool}"

    def _launcher_here(self, model: str, name: str, pool: PoolSettings) -> Launcher:
        def launch(worker: str, port: int, gpus: Sequence[int]) -> Launch:
            if pool.engine != "sim":
                additions = [
                    each for children in self._children if (each := children.addition(worker, pool)) is not None
                ]
                made = launch_of(worker, model, pool, port=port, gpus=gpus, host=self._host, additions=additions)
                if not pool.access.any:
                    return made
                keys = key_env(pool.engine, self._accesses.of_pool(model, name))
                return msgspec.structs.replace(made, env={**keys, **made.env})
            # A simulated engine reports its port, and is trusted with the cluster's secret.
            made = launch_of(worker, model, pool, port=0, gpus=gpus, host=self._host)
            secret = {} if self._secret is None else {SECRET_ENV: self._secret}
            sibling = {SIBLING_ENV: "1"} if pool.share_weights and self._has_sibling(worker) else {}
            return msgspec.structs.replace(made, env={**made.env, **secret, **sibling})

        return launch

    def _has_sibling(self, worker: str) -> bool:
        """Return whether another engine of a starting one's pool serves; one that is adopted has started long ago."""
        state = self.driver.fleet.state
        life = state.lives.get(worker)
        return life is not None and any(each.worker in self._cards for each in state.of(life.pool) if each is not life)

    def _watched(self, now: Nanos, machine: str, event: Event, effects: Sequence[Effect]) -> None:
        if self._journal is not None:
            self._journal.watch(now, machine, event, effects)
        for effect in effects if self._children else ():
            for children in self._children:
                if isinstance(effect, Spawn):
                    children.spawned(effect.worker, effect.pool, effect.number)
                elif isinstance(effect, Forget):
                    children.forgotten(effect.worker, effect.pool)

    async def _describe(self, engine: EngineProcess, role: Role) -> WorkerCard:
        # A restarted engine must be newer than its former self, also after a restart of this process.
        configured = self.driver.fleet.state.pools[engine.pool].configured
        settings = self._enter(engine.pool, engine.url)
        known = {**engine.card, "pid": engine.pid, "access": self._accessed.get(engine.pool, (None, None))[1]}
        if role != configured.role:
            known["role"] = role
        overrides = {key: value for key, value in known.items() if value is not None}
        epoch = self._newer_epoch()
        worker = WorkerId(engine.worker)
        return await describe(
            self._http.session,
            engine.url,
            worker=worker,
            epoch=epoch,
            model=configured.model,
            overrides=overrides,
            pool=settings,
        )

    def _newer_epoch(self) -> int:
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        return self._epoch

    async def _announce(self, card: WorkerCard, *, draining: bool, silent: bool = False) -> None:
        announced = card if self._relays is None else self._relays.announced(card)
        entry = MembershipEntry(card=announced, draining=draining, silent=silent)
        while True:
            try:
                ttl = self._ttl if self._elsewhere is None else None
                await self._store.put(key_of(card.id), msgspec.json.encode(entry), ttl=ttl)
                break
            except StoreUnavailable as error:
                log.warning("the entry of %s can't be written to the store: %s", card.id, error)
                await asyncio.sleep(RETRY)  # until the fleet wants something else of it
        self._cards[card.id] = card
        self.changed.set()

    def _of_mine(self, worker: str) -> bool:
        """Return whether a worker's id is of a pool of this fleet."""
        return worker.rpartition("-")[0] in self.driver.fleet.state.pools

    def _with_role(self, replica: Replica) -> Replica:
        """Return a replica with the role that its card says: a server may know it better than its pool."""
        card = self._cards.get(replica.id)
        return msgspec.structs.replace(replica, role=None if card is None else card.role)

    async def _flush(self) -> None:
        while self._journal is not None:
            await asyncio.sleep(FLUSH_EVERY)
            await asyncio.to_thread(self._journal.flush)

    async def _watch(self) -> None:
        async for _ in self.driver.changes():
            self.changed.set()
