"""Which engines does this supervisor look after? Its own processes and servers by URL; the routers hear of them here.

An engine knows nothing of the cluster: the fleet asks it what it is and puts its card under ``workers/<id>``.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from penstock.adapters.connectors.engine import Engine, Template
from penstock.adapters.connectors.gpus import Gpus, inventory
from penstock.adapters.connectors.process import ProcessConnector
from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.engines.describe import describe, healthy, lacking
from penstock.adapters.engines.handover import USUAL
from penstock.adapters.engines.launch import Launch, launch_of
from penstock.adapters.seams import ReplicaState, Store, StoreUnavailable
from penstock.config.cluster import PoolSettings, SuperviseSettings
from penstock.config.secret import SECRET_ENV, without_secrets
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import Role, WorkerCard, WorkerId
from penstock.runtime.attached import Attached
from penstock.runtime.draining import drained, tell
from penstock.runtime.membership import Entry, key_of
from penstock.runtime.relay import Relays
from penstock.runtime.seen import known_to_all
from penstock.runtime.wishes import DRAINED, DrainReport, DrainWish, PoolReport, ReplicaReport

log = logging.getLogger("penstock.fleet")

GPU_ENGINES = ("vllm",)
"""Kinds that compute on GPUs where there are any."""


class Fleet:
    """The engines of this machine and the servers that were attached by URL: `open`, `add_pool`, then `start`.

    Args:
        state: where it writes down its processes, owned by the caller.
        logs: folder for the engines' logs.
        ttl: seconds after which the cards go away when this process dies.
        env: of the engines; this process's own where it is not given. None of our secrets is handed on.
        secret: of the cluster, told to engines of ours, which tell their KV events only to who knows it.
        host: address of this machine on which engines of ours listen.
        relays: through which the engines' KV events go, where the routers do not hear them directly; closed by `stop`.
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
        relays: Relays | None = None,
        orphan_grace: float = 0.0,
        end: float = 30.0,
    ) -> None:
        self.settings = settings
        self.drains: dict[str, DrainWish] = {}
        """Workers of ours that are to be drained."""
        self.patience: dict[str, float | None] = {}
        """Pool -> seconds that its workers get to finish where the pool shrinks; None is what the settings say."""
        self.roles: dict[str, Role] = {}
        """Roles that workers of ours have been given, other than their pool's."""
        self._pool_roles: dict[str, Role] = {}
        self.changed = asyncio.Event()
        """Set when a pool is not as it was last reported."""
        self._store = store
        self._ttl = ttl
        self._secret = secret
        self._host = host
        self._relays = relays
        own = os.environ if env is None else env
        self.gpus = Gpus(inventory(settings.gpus, own))
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
        self._attached: dict[str, list[Attached]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._models: dict[str, str] = {}
        """Pool -> its model."""
        self._cards: dict[str, WorkerCard] = {}
        self._drained: set[str] = set()
        """Workers with a report of a drain in the store."""
        self._epoch = 0
        self._http: aiohttp.ClientSession | None = None

    def use(self, settings: SuperviseSettings) -> None:
        """Go on with other settings."""
        self.settings = settings
        self.connector.use(settings)

    async def open(self) -> None:
        """Hold what a supervisor that was killed left running."""
        await self.connector.open()

    def add_pool(self, model: str, name: str, pool: PoolSettings, *, prefix: str = "") -> list[WorkerId]:
        """Look after a pool's engines or URLs from `start` on; return their ids.

        Raises:
            ConfigError: the machine has too few GPUs.
        """
        base = f"{prefix}{name}"
        self._models[base] = model
        self._pool_roles[base] = pool.role
        if not pool.urls:
            gpus = pool.gpus
            if gpus is None:
                gpus = int(pool.engine in GPU_ENGINES and bool(self.gpus.all))
            template = Template(base, self._launcher(model, pool), gpus)
            return [WorkerId(worker) for worker in self.connector.add(base, template, pool.replicas)]
        found = [Attached(self, WorkerId(f"{base}-{n}"), model, url, pool) for n, url in enumerate(pool.urls)]
        self._attached[base] = found
        return [attached.worker for attached in found]

    async def start(self) -> None:
        """Start what is missing."""
        await self.connector.start()
        for attached in self.servers:
            self._tasks.append(asyncio.create_task(self._follow(attached), name=f"server-{attached.worker}"))
        self._tasks.append(asyncio.create_task(self._watch(), name="connector"))

    async def ready(self) -> None:
        """Wait for the first word of every engine.

        Raises:
            PenstockError: one could not be started or reached; the message says which and why.
        """
        await asyncio.gather(self.connector.ready(), *(asyncio.shield(server.ready) for server in self.servers))

    async def stop(self, *, at_once: bool = False) -> None:
        """Take every worker out of the store, then end the processes; attached servers go on by themselves."""
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
    def servers(self) -> list[Attached]:
        """The servers that somebody else runs."""
        return [attached for pool in self._attached.values() for attached in pool]

    async def reports(self) -> list[PoolReport]:
        """Return every pool as it is now."""
        found = []
        for pool, scale in (await self.connector.pools()).items():
            replicas = tuple(
                ReplicaReport(**replica._asdict(), role=self._role_shown(replica.id)) for replica in scale.replicas
            )
            found.append(
                PoolReport(
                    pool=pool,
                    model=self._models[pool],
                    kind="process",
                    role=self._pool_roles[pool],
                    desired=scale.desired,
                    replicas=replicas,
                    limit=scale.limit,
                )
            )
        for pool, servers in self._attached.items():
            model = self._models[pool]
            replicas = tuple(self._shown(server) for server in servers)
            role = self._pool_roles[pool]
            found.append(
                PoolReport(pool=pool, model=model, kind="urls", role=role, desired=len(servers), replicas=replicas)
            )
        return found

    @property
    def workers(self) -> int:
        """How many serve now."""
        return len(self._cards)

    # --- what the connector and the servers ask of us -----------------------------------------------------------------

    async def answers(self, url: str) -> bool:
        return await healthy(self._client(), url)

    async def lacks(self, url: str) -> str | None:
        return await lacking(self._client(), url)

    async def came(self, engine: Engine) -> None:
        known = {**engine.card, "pid": engine.pid}
        card = await self.describe(WorkerId(engine.worker), self._models[engine.pool], engine.url, known)
        await self.announce(card)
        await known_to_all(self._store, card)
        if engine.worker in self._drained:
            self._drained.discard(engine.worker)
            await self._store.delete(DRAINED + engine.worker)

    async def leave(self, engine: Engine) -> None:
        card = self._cards.get(engine.worker)
        if card is None:
            return
        report = await self.drain(card)
        if not report.cut:
            # The routers let go of it first; with requests still there they see it end, and go on elsewhere.
            await self.withdraw(card.id)

    async def gone(self, engine: Engine) -> None:
        await self.withdraw(WorkerId(engine.worker))

    async def describe(self, worker: WorkerId, model: str, url: str, known: Mapping[str, object]) -> WorkerCard:
        # A restarted engine must be newer than its former self, also after a restart of this process.
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        overrides = {key: value for key, value in known.items() if value is not None}
        if worker in self.roles:
            overrides["role"] = self.roles[worker]
        return await describe(self._client(), url, worker=worker, epoch=self._epoch, model=model, overrides=overrides)

    async def flip(self, worker: WorkerId, role: Role | None, timeout: float | None) -> None:
        """Let a worker finish what it has, then do something else for requests; None is what its pool is for.

        To the routers it is a new one: what they knew of it, but for its KV events, is of its old role.
        """
        if role is None:
            self.roles.pop(worker, None)
            role = self._pool_roles[worker.rpartition("-")[0]]
        else:
            self.roles[worker] = role
        card = self._cards.get(worker)
        if card is None or card.role == role:
            return  # it takes the role when it comes, or has it
        if timeout is not None:
            self.drains[worker] = DrainWish(timeout=timeout)
        try:
            await self.drain(card)
        finally:
            if timeout is not None:
                self.drains.pop(worker, None)
        if self._cards.get(worker) != card:
            return  # it ended meanwhile
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        handoff = card.handoff or USUAL.get(card.engine)
        flipped = msgspec.structs.replace(card, role=role, epoch=self._epoch, born=card.incarnation, handoff=handoff)
        await self.announce(flipped)
        for server in self.servers:
            if server.worker == worker:
                server.card = flipped
        await known_to_all(self._store, flipped)
        self._drained.discard(worker)
        await self._store.delete(DRAINED + worker)
        log.info("%s is %s now, and was %s", worker, role, card.role)

    async def drain(self, card: WorkerCard) -> DrainReport:
        """Take a worker from the routers and wait until it is idle or its time is over."""
        wish = self.drains.get(card.id)
        self._drained.add(card.id)
        timeout = None if wish is None else wish.timeout
        if timeout is None and wish is None:
            timeout = self.patience.get(card.id.rpartition("-")[0])
        timeout = self.settings.drain_timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        while True:
            try:
                await self.announce(card, draining=True)
                break
            except StoreUnavailable as error:
                log.warning("the routers can't be told that %s leaves: %s", card.id, error)
                if time.monotonic() > end:
                    break
                await asyncio.sleep(min(1.0, timeout))
        return await drained(
            self._store,
            card,
            max(0.0, end - time.monotonic()),
            revision=None if wish is None else wish.revision,
            say=lambda report: tell(self._store, report, self._ttl),
        )

    async def announce(self, card: WorkerCard, *, draining: bool = False) -> None:
        entry = Entry(card=card if self._relays is None else self._relays.announced(card), draining=draining)
        await self._store.put(key_of(card.id), msgspec.json.encode(entry), ttl=self._ttl)
        self._cards[card.id] = card
        self.changed.set()

    async def withdraw(self, worker: WorkerId) -> None:
        if self._cards.pop(worker, None) is None:
            return
        self.changed.set()
        if self._relays is not None:
            self._relays.gone(worker)
        try:
            await self._store.delete(key_of(worker))
        except PenstockError as error:
            log.warning("worker %s could not be taken out of the store: %s", worker, error)

    # --- below --------------------------------------------------------------------------------------------------------

    def _launcher(self, model: str, pool: PoolSettings) -> Callable[[str, int, Sequence[int]], Launch]:
        def launch(worker: str, port: int, gpus: Sequence[int]) -> Launch:
            if pool.engine != "sim":
                return launch_of(worker, model, pool, port=port, gpus=gpus, host=self._host)
            # A simulated engine says which port it took, and is trusted with the cluster's secret.
            made = launch_of(worker, model, pool, port=0, gpus=gpus, host=self._host)
            secret = {} if self._secret is None else {SECRET_ENV: self._secret}
            return msgspec.structs.replace(made, env={**made.env, **secret})

        return launch

    def _shown(self, server: Attached) -> ReplicaReport:
        if server.card is None:
            return ReplicaReport(id=server.worker, state="failed", reason="it does not answer", pid=None)
        state: ReplicaState = "draining" if server.parked else "ready"
        return ReplicaReport(id=server.worker, state=state, pid=server.card.pid, role=self._role_shown(server.worker))

    def _role_shown(self, worker: str) -> Role | None:
        card = self._cards.get(worker)
        return None if card is None else card.role

    async def _watch(self) -> None:
        async for _ in self.connector.watch():
            self.changed.set()

    async def _follow(self, attached: Attached) -> None:
        """Supervision boundary: looking after one server must never end unseen."""
        try:
            await attached.run()
        except Exception:
            log.exception("server %s is not looked after any more", attached.url)
            raise

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http
