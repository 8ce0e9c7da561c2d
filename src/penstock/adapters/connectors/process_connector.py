"""`Connector` over engine processes of this machine: starts and ends them until each pool has its desired replicas."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from itertools import chain, count
from pathlib import Path

import msgspec

from penstock.adapters.connectors.engine_process import EngineTemplate, ReplicaHooks
from penstock.adapters.connectors.gpu_inventory import GpuAllocator
from penstock.adapters.connectors.replica_lifecycle import ReplicaDeps, ReplicaLifecycle, SurvivingEngine
from penstock.adapters.connectors.shim_client import ShimClient
from penstock.adapters.connectors.state_file import StateEntry, StateFile, living
from penstock.adapters.seams import ConnectorError
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Pool

log = logging.getLogger("penstock.connector")

REPLICAS_MAX = 1024


class _ProcessPool:
    def __init__(self, name: str, template: EngineTemplate, configured: Pool) -> None:
        self.name = name
        self.template = template
        self.configured = configured
        self.goal = configured
        """The pool as it should be now; its replicas are the ``lives``."""
        self.without: frozenset[str] = frozenset()
        self.recalled: set[int] = set()
        """Numbers that were left out and no longer are: a missing replica gets one of these first."""
        self.lives: dict[int, ReplicaLifecycle] = {}

    def want(self, replicas: int) -> None:
        self.goal = msgspec.structs.replace(self.goal, desired=replicas)

    @property
    def gpus(self) -> int:
        """GPUs of all replicas that there should be."""
        return self.goal.desired * self.template.gpus


class ProcessConnector:
    """A `Connector` over processes of this machine: `open`, then `add` every pool, then `start`.

    Args:
        logs: folder for the engines' logs.
        env: of the engines, before what their launch adds.
        orphan_grace: seconds that engines outlive this process where it is killed.
        end: seconds that they then get to end by themselves.
    """

    def __init__(
        self,
        settings: SuperviseSettings,
        state: StateFile,
        care: ReplicaHooks,
        *,
        logs: Path,
        gpus: GpuAllocator,
        env: Mapping[str, str],
        orphan_grace: float,
        end: float,
    ) -> None:
        self._means = ReplicaDeps(settings, state, care, gpus, logs, env, orphan_grace, end, news=self._news)
        self._pools: dict[str, _ProcessPool] = {}
        self._survivors: dict[str, SurvivingEngine] = {}
        self._watchers: set[asyncio.Event] = set()
        self._closing = False

    @property
    def restarts(self) -> int:
        return self._means.restarts

    @property
    def adopted(self) -> list[str]:
        """Workers that were adopted from a supervisor that was killed."""
        return self._means.adopted

    def use(self, settings: SuperviseSettings) -> None:
        """Use these settings from now on."""
        self._means.settings = settings

    # --- before start -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Adopt the engines that a killed supervisor left running, before they end by themselves."""
        for name, entry in list(living(self._means.state.entries)):
            assert entry.lease is not None
            log_path = Path(entry.log) if entry.log else self._means.logs / f"{name}.log"
            shim = await ShimClient.adopt(entry.worker or name, entry.lease, log_path)
            if shim is not None:
                survivor = self._survivors[name] = SurvivingEngine(entry, shim)
                if not self._means.gpus.claim(survivor.resources.gpus):
                    log.warning("%s has GPUs that are not ours to give: %s", name, survivor.resources.gpus)

    def add(self, name: str, template: EngineTemplate, configured: Pool) -> list[str]:
        """Reconcile a pool from `start` on; return the ids of the engines that it then has.

        Raises:
            ConfigError: the machine has too few GPUs.
        """
        pool = self._pools[name] = _ProcessPool(name, template, configured)
        state, gpus = self._means.state, self._means.gpus
        for number in range(REPLICAS_MAX):
            entry = state.name(template.component, number)
            if entry in self._survivors and _same(self._survivors[entry], template, number):
                pool.lives[number] = ReplicaLifecycle(self._means, name, template, number, self._survivors.pop(entry))
        known = state.entries.get(state.name(template.component, 0))
        if pool.lives and known is not None and known.configured == configured.desired and known.replicas is not None:
            pool.want(known.replicas)  # as it was scaled before the crash
        needed, replicas = sum(other.gpus for other in self._pools.values()), pool.goal.desired
        if needed > len(gpus.all):
            raise ConfigError(
                f"pool {name} takes {replicas} x {template.gpus} GPUs, all together {needed}; there are: {gpus}",
                hint="set fewer replicas or fewer gpus per replica, or say with supervise.gpus which there are",
            )
        self._settle(pool)
        return [life.worker for life in pool.lives.values() if life.keep_running]

    async def start(self) -> None:
        """End the survivors that no pool wants, then start what is missing."""
        state, means = self._means.state, self._means
        unwanted, self._survivors = self._survivors, {}
        await asyncio.gather(*(survivor.shim.stop(means.settings.stop_grace) for survivor in unwanted.values()))
        for name, survivor in unwanted.items():
            means.gpus.give(survivor.resources.gpus)
            log.info("%s of an earlier run is not what is wanted now, and was ended", name)
        mine = {state.name(p.template.component, n) for p in self._pools.values() for n in (0, *p.lives)}
        state.entries = {name: _known(entry, unwanted, name) for name, entry in state.entries.items() if name in mine}
        for pool in self._pools.values():
            self._reconcile(pool)

    async def ready(self) -> None:
        """Wait until every engine served for the first time, or failed to.

        Raises:
            PenstockError: an engine could not be started; the message says which and why.
        """
        waiting = [life.first for pool in self._pools.values() for life in pool.lives.values() if life.keep_running]
        if waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        for future in waiting:
            if future.done() and not future.cancelled():
                future.result()

    # --- the Connector seam -----------------------------------------------------------------------------------------

    async def pools(self) -> Mapping[str, Pool]:
        return {name: self._shown(pool) for name, pool in self._pools.items()}

    async def scale(self, pool: str, replicas: int, *, without: Collection[str] = ()) -> None:
        entry = self._pools.get(pool)
        if entry is None:
            known = ", ".join(sorted(self._pools)) or "none"
            raise ConnectorError(f"there is no pool {pool!r} of processes here; there is {known}")
        most = self._limit(entry)
        if not 0 <= replicas <= most:
            each = entry.template.gpus
            reason = f": each has {each} of the GPUs {self._means.gpus}" if each else ""
            raise ConnectorError(f"pool {pool} can have 0 to {most} replicas, not {replicas}{reason}")
        let_in, entry.without = entry.without.difference(without), frozenset(without)
        named = entry.template.number
        entry.recalled |= {number for worker in let_in if (number := named(worker)) is not None}
        entry.recalled -= {named(worker) for worker in without}
        entry.want(replicas)
        self._reconcile(entry)

    async def watch(self) -> AsyncIterator[Mapping[str, Pool]]:
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            while not self._closing:
                event.clear()
                yield await self.pools()
                await event.wait()
        finally:
            self._watchers.discard(event)

    async def close(self, *, at_once: bool = False) -> None:
        """End every engine without a drain; scale a pool to 0 first to drain it.

        Args:
            at_once: give the engines no time to end by themselves.
        """
        self._closing = True
        lives = [life for pool in self._pools.values() for life in pool.lives.values()]
        grace = 0.0 if at_once else self._means.settings.stop_grace
        await asyncio.gather(*(life.cut(grace) for life in lives))
        await asyncio.gather(*(survivor.shim.stop(grace) for survivor in self._survivors.values()))
        self._means.state.entries.clear()
        self._news()

    # --- desired state ----------------------------------------------------------------------------------------------

    def _reconcile(self, pool: _ProcessPool) -> None:
        if self._closing:
            return
        self._settle(pool)
        self._means.state.record_replicas(pool.template.component, pool.goal.desired, pool.configured.desired)
        for life in pool.lives.values():
            if life.task is None:
                life.task = asyncio.create_task(self._live(pool, life), name=f"engine-{life.worker}")
        self._news()

    async def _live(self, pool: _ProcessPool, life: ReplicaLifecycle) -> None:
        await life.run()
        del pool.lives[life.number]
        self._reconcile(pool)  # its number is free again, and it may be missing by now

    def _settle(self, pool: _ProcessPool) -> None:
        """Decide which replicas stay and which are new."""
        for life in pool.lives.values():
            if life.worker in pool.without:
                life.want(False)
        staying = [life for life in pool.lives.values() if life.keep_running]
        # A replica that does not serve goes first, then the youngest, whose cache is the emptiest.
        staying.sort(key=lambda life: (life.state == "ready", -life.created_at, -life.number))
        for life in staying[: max(0, len(staying) - pool.goal.desired)]:
            life.want(False)
        missing = pool.goal.desired - len(staying)
        for life in pool.lives.values():
            if missing > 0 and not life.keep_running and life.may_stay and life.worker not in pool.without:
                life.want(True)
                missing -= 1
        recalled = pool.recalled
        # A replica that still ends is not replaced by another: it starts again once its number is free.
        pool.recalled = {number for number in recalled if number in pool.lives and not pool.lives[number].keep_running}
        missing -= len(pool.recalled)
        for number in chain(sorted(recalled), count()):
            if missing <= 0:
                break
            if number not in pool.lives and pool.template.worker(number) not in pool.without:
                pool.lives[number] = ReplicaLifecycle(self._means, pool.name, pool.template, number)
                missing -= 1

    def _limit(self, pool: _ProcessPool) -> int:
        each = pool.template.gpus
        if not each:
            return REPLICAS_MAX
        others = sum(other.gpus for other in self._pools.values() if other is not pool)
        return (len(self._means.gpus.all) - others) // each

    def _shown(self, pool: _ProcessPool) -> Pool:
        replicas = tuple(life.shown for _, life in sorted(pool.lives.items()))
        return msgspec.structs.replace(pool.goal, replicas=replicas, limit=self._limit(pool))

    def _news(self) -> None:
        for event in self._watchers:
            event.set()


def _same(survivor: SurvivingEngine, template: EngineTemplate, number: int) -> bool:
    """Return whether a survivor is what we would start now under its number."""
    resources = survivor.resources
    launch = template.launch(template.worker(number), resources.port, resources.gpus)
    return list(launch.argv) == survivor.entry.command and len(resources.gpus) == template.gpus


def _known(entry: StateEntry, unwanted: Mapping[str, SurvivingEngine], name: str) -> StateEntry:
    """Return an entry of an earlier run, without its engine where that engine was ended."""
    if entry.lease is None or name in unwanted:
        return StateEntry(command=entry.command, replicas=entry.replicas, configured=entry.configured)
    return msgspec.structs.replace(entry)
