"""Engine fleet of one supervisor: its own engine processes and attached servers, announced to the routers.

An engine knows nothing of the cluster: the fleet reads its description and puts its card under ``workers/<id>``.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate
from penstock.adapters.connectors.gpu_inventory import GpuAllocator, inventory
from penstock.adapters.connectors.process_connector import ProcessConnector
from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.engines.describe import describe, healthy, lacking
from penstock.adapters.engines.dialects.kv_transfer_protocol import USUAL
from penstock.adapters.engines.launch import Launch, launch_of
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.config.cluster_secret_file import SECRET_ENV, without_secrets
from penstock.config.settings.cluster_settings import PoolSettings, SuperviseSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import Pool, Replica, ReplicaState, Role, WorkerCard, WorkerId
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.cluster_state.desired_state import DRAINED, DrainSpec, DrainStatus, PoolStatus
from penstock.runtime.cluster_state.membership import MembershipEntry, key_of
from penstock.runtime.cluster_state.membership_ack import acknowledged_by_all
from penstock.runtime.kv_events.kv_event_relay import KvEventRelays
from penstock.runtime.supervision.attached_servers import AttachedServer
from penstock.runtime.supervision.drain_wait import drained, report_drain

log = logging.getLogger("penstock.fleet")

GPU_ENGINES = ("vllm", "llamacpp")
"""Kinds of engines that compute on GPUs where there are any."""


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
    ) -> None:
        self.settings = settings
        self.drains: dict[str, DrainSpec] = {}
        """Workers of this fleet to be drained."""
        self.patience: dict[str, float | None] = {}
        """Pool -> seconds that its workers get to finish where the pool shrinks; None: by the settings."""
        self.roles: dict[str, Role] = {}
        """Roles of workers of this fleet other than their pool's."""
        self.changed = asyncio.Event()
        """Set when a pool differs from its last report."""
        self.crashes = CrashBook(store, ttl)
        self._store = store
        self._ttl = ttl
        self._secret = secret
        self._host = host
        self._relays = relays
        own = os.environ if env is None else env
        self.gpus = GpuAllocator(inventory(settings.gpus, own))
        self.connector = ProcessConnector(
            settings,
            state,
            self,
            logs=logs,
            gpus=self.gpus,
            env=without_secrets(own),
            orphan_grace=orphan_grace,
            end=end,
        )
        self._attached: dict[str, list[AttachedServer]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._pools: dict[str, Pool] = {}
        """Pools as they were configured."""
        self._cards: dict[str, WorkerCard] = {}
        self._drained: set[str] = set()
        """Workers with a report of a drain in the store."""
        self._epoch = 0
        self._http: aiohttp.ClientSession | None = None

    def use(self, settings: SuperviseSettings) -> None:
        """Use these settings from now on."""
        self.settings = settings
        self.connector.use(settings)

    async def open(self) -> None:
        """Adopt the engines that a killed supervisor left running."""
        await self.connector.open()

    def add_pool(self, model: str, name: str, pool: PoolSettings, *, prefix: str = "") -> list[WorkerId]:
        """Run a pool's engines, or follow its URLs, from `start` on; return their ids.

        Raises:
            ConfigError: the machine has too few GPUs.
        """
        base = f"{prefix}{name}"
        configured = Pool(model=model, role=pool.role, desired=len(pool.urls) or pool.replicas)
        self._pools[base] = configured
        if not pool.urls:
            gpus = pool.gpus
            if gpus is None:
                gpus = int(pool.engine in GPU_ENGINES and bool(self.gpus.all))
            template = EngineTemplate(base, self._launcher(model, pool), gpus)
            configured = msgspec.structs.replace(configured, gpus=max(1, gpus))
            return [WorkerId(worker) for worker in self.connector.add(base, template, configured)]
        servers = [AttachedServer(self, WorkerId(f"{base}-{n}"), model, url, pool) for n, url in enumerate(pool.urls)]
        self._attached[base] = servers
        return [attached.worker for attached in servers]

    async def start(self) -> None:
        """Start what is missing."""
        await self.connector.start()
        for attached in self.servers:
            self._tasks.append(asyncio.create_task(self._follow(attached), name=f"server-{attached.worker}"))
        self._tasks.append(asyncio.create_task(self._watch(), name="connector"))
        self._tasks.append(asyncio.create_task(self.crashes.run(), name="crashes"))

    async def ready(self) -> None:
        """Wait until every engine served for the first time, or failed to.

        Raises:
            PenstockError: an engine could not be started, or a server not reached; the message says which and why.
        """
        await asyncio.gather(self.connector.ready(), *(asyncio.shield(server.ready) for server in self.servers))

    async def stop(self, *, at_once: bool = False) -> None:
        """Take every worker out of the store, then end the processes; attached servers keep running."""
        for worker in list(self._cards):
            await self.withdraw(WorkerId(worker))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._relays is not None:
            await self._relays.close()
        await self.connector.close(at_once=at_once)
        if self._http is not None:
            await self._http.close()

    @property
    def servers(self) -> list[AttachedServer]:
        """The servers that others run."""
        return [attached for pool in self._attached.values() for attached in pool]

    async def reports(self) -> dict[str, PoolStatus]:
        """Return every pool as it is now, by its name."""
        statuses = {}
        for name, pool in (await self.connector.pools()).items():
            replicas = [msgspec.structs.replace(each, role=self._role_shown(each.id)) for each in pool.replicas or ()]
            statuses[name] = PoolStatus(pool=msgspec.structs.replace(pool, replicas=tuple(replicas)), kind="process")
        for name, servers in self._attached.items():
            pool = msgspec.structs.replace(self._pools[name], replicas=tuple(map(self._shown, servers)))
            statuses[name] = PoolStatus(pool=pool, kind="urls")
        return statuses

    @property
    def workers(self) -> int:
        """Number of workers that serve now."""
        return len(self._cards)

    # --- hooks of the connector and the servers -----------------------------------------------------------------------

    async def answers(self, url: str) -> bool:
        return await healthy(self._client(), url)

    async def missing(self, url: str) -> str | None:
        return await lacking(self._client(), url)

    async def replica_ready(self, engine: EngineProcess) -> None:
        known = {**engine.card, "pid": engine.pid}
        card = await self.describe(WorkerId(engine.worker), self._pools[engine.pool].model, engine.url, known)
        await self.announce(card)
        await acknowledged_by_all(self._store, card)
        if engine.worker in self._drained:
            self._drained.discard(engine.worker)
            await self._store.delete(DRAINED + engine.worker)

    async def leave(self, engine: EngineProcess) -> None:
        card = self._cards.get(engine.worker)
        if card is None:
            return
        report = await self.drain(card)
        if not report.cut:
            # The routers drop it first; requests that still run there break off with it, and migrate.
            await self.withdraw(card.id)

    async def replica_ended(self, engine: EngineProcess) -> None:
        await self.withdraw(WorkerId(engine.worker))

    def crashed(self, worker: str, reason: str) -> None:
        self.crashes.add(worker, "engine", reason)

    def silent(self, worker: WorkerId) -> None:
        self.crashes.add(worker, "server", "stopped to answer its health check")

    async def describe(self, worker: WorkerId, model: str, url: str, known: Mapping[str, object]) -> WorkerCard:
        # A restarted engine must be newer than its former self, also after a restart of this process.
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        overrides = {key: value for key, value in known.items() if value is not None}
        if worker in self.roles:
            overrides["role"] = self.roles[worker]
        return await describe(self._client(), url, worker=worker, epoch=self._epoch, model=model, overrides=overrides)

    async def flip(self, worker: WorkerId, role: Role | None, timeout: float | None) -> None:
        """Let a worker finish its requests, then change its role; None is its pool's role.

        To the routers it is a new worker: what they know of it, except its KV events, is of its old role.
        """
        if role is None:
            self.roles.pop(worker, None)
            role = self._pools[worker.rpartition("-")[0]].role
        else:
            self.roles[worker] = role
        card = self._cards.get(worker)
        if card is None or card.role == role:
            return  # it gets the role when it starts, or has it
        if timeout is not None:
            self.drains[worker] = DrainSpec(timeout=timeout)
        try:
            await self.drain(card)
        finally:
            if timeout is not None:
                self.drains.pop(worker, None)
        if self._cards.get(worker) != card:
            return  # it ended meanwhile
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        handoff = card.handoff or USUAL.get(card.engine)
        flipped = msgspec.structs.replace(
            card, role=role, epoch=self._epoch, started_epoch=card.incarnation, handoff=handoff
        )
        await self.announce(flipped)
        for server in self.servers:
            if server.worker == worker:
                server.card = flipped
        await acknowledged_by_all(self._store, flipped)
        self._drained.discard(worker)
        await self._store.delete(DRAINED + worker)
        log.info("%s is %s now, and was %s", worker, role, card.role)

    async def drain(self, card: WorkerCard) -> DrainStatus:
        """Take a worker from the routers and wait until it is idle or its time is over."""
        spec = self.drains.get(card.id)
        self._drained.add(card.id)
        timeout = None if spec is None else spec.timeout
        if timeout is None and spec is None:
            timeout = self.patience.get(card.id.rpartition("-")[0])
        timeout = self.settings.drain_timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        while True:
            try:
                await self.announce(card, draining=True)
                break
            except StoreUnavailable as error:
                log.warning("the drain of %s can't be written to the store: %s", card.id, error)
                if time.monotonic() > end:
                    break
                await asyncio.sleep(min(1.0, timeout))
        return await drained(
            self._store,
            card,
            max(0.0, end - time.monotonic()),
            revision=None if spec is None else spec.revision,
            say=lambda report: report_drain(self._store, report, self._ttl),
        )

    async def announce(self, card: WorkerCard, *, draining: bool = False) -> None:
        entry = MembershipEntry(card=card if self._relays is None else self._relays.announced(card), draining=draining)
        await self._store.put(key_of(card.id), msgspec.json.encode(entry), ttl=self._ttl)
        self._cards[card.id] = card
        self.changed.set()

    async def withdraw(self, worker: WorkerId) -> None:
        if self._cards.pop(worker, None) is None:
            return
        self.changed.set()
        if self._relays is not None:
            self._relays.remove(worker)
        try:
            await self._store.delete(key_of(worker))
        except PenstockError as error:
            log.warning("worker %s could not be taken out of the store: %s", worker, error)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _launcher(self, model: str, pool: PoolSettings) -> Callable[[str, int, Sequence[int]], Launch]:
        def launch(worker: str, port: int, gpus: Sequence[int]) -> Launch:
            if pool.engine != "sim":
                return launch_of(worker, model, pool, port=port, gpus=gpus, host=self._host)
            # A simulated engine reports its port, and is trusted with the cluster's secret.
            made = launch_of(worker, model, pool, port=0, gpus=gpus, host=self._host)
            secret = {} if self._secret is None else {SECRET_ENV: self._secret}
            return msgspec.structs.replace(made, env={**made.env, **secret})

        return launch

    def _shown(self, server: AttachedServer) -> Replica:
        if server.card is None:
            return Replica(id=server.worker, state="failed", reason="it does not answer")
        state: ReplicaState = "draining" if server.parked else "ready"
        return Replica(id=server.worker, state=state, pid=server.card.pid, role=self._role_shown(server.worker))

    def _role_shown(self, worker: str) -> Role | None:
        card = self._cards.get(worker)
        return None if card is None else card.role

    async def _watch(self) -> None:
        async for _ in self.connector.watch():
            self.changed.set()

    async def _follow(self, attached: AttachedServer) -> None:
        """Supervision boundary: the task of one server must never end silently."""
        try:
            await attached.run()
        except Exception:
            log.exception("server %s is not looked after any more", attached.url)
            raise

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http
