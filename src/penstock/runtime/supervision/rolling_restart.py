"""Rolling restart: replaces all engines, then all frontends, one by one, without losing a request.

A successor is started before its predecessor is drained wherever the machine has room for it. Where every GPU is taken,
the predecessor is drained first; for a pool's last engine this happens only with ``force``.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.adapters.seams import ConnectorError, Store, StoreUnavailable
from penstock.kernel.errors import EngineError, PenstockError
from penstock.kernel.values import Pool
from penstock.runtime.cluster_state.desired_state import RESTART, RESTARTED, RestartSpec, RestartStatus, decode, put
from penstock.runtime.cluster_state.store_watch import RETRY, follow
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock.runtime.supervision.frontend_processes import FrontendProcesses
from penstock.runtime.supervision.reconciler import Reconciler

log = logging.getLogger("penstock.supervisor")


class RollingRestart:
    """Follows the `RestartSpec`, and carries out each new one once.

    Args:
        ttl: seconds after which the report goes when this process dies.
    """

    def __init__(
        self, store: Store, operator: Reconciler, fleet: EngineFleet, frontends: FrontendProcesses, *, ttl: float
    ) -> None:
        self._store = store
        self._operator = operator
        self._fleet = fleet
        self._frontends = frontends
        self._ttl = ttl
        self._spec: RestartSpec | None = None
        self._spec_changed = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._work())

    async def _follow(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec = decode(RestartSpec, raw)
            if spec is not None and spec != self._spec:
                self._spec = spec
                self._spec_changed.set()

        async def deleted(key: str) -> None:
            pass  # a restart that has begun is finished

        await follow(self._store, RESTART, known=lambda: (), put=changed, deleted=deleted, frozen=lambda error: None)

    async def _work(self) -> None:
        while True:
            await self._spec_changed.wait()
            self._spec_changed.clear()
            spec = self._spec
            assert spec is not None
            log.info("every engine and every frontend is replaced, requested by %s", spec.by or "an operator")
            progress = _RestartProgress(self._store, spec.revision, self._ttl)
            try:
                await self._restart(spec, progress)
                await progress.report("done")
            except (PenstockError, OSError) as error:
                log.error("the restart stops: %s", error)
                await progress.report("failed", str(error))
            except Exception as error:  # supervision boundary: the next restart spec must still be followed
                log.exception("the restart stops by a bug of ours")
                await progress.report("failed", f"{type(error).__name__}: {error}")

    async def _restart(self, spec: RestartSpec, progress: "_RestartProgress") -> None:
        pools = await self._fleet.connector.pools()
        engines = [(name, worker) for name, pool in pools.items() for worker in pool.ids]
        progress.left = len(engines) + len(self._frontends.indices)
        await progress.report("running")
        for name, worker in engines:
            await self._replace(name, worker, force=spec.force)
            await progress.did(worker)
        for name, pool in pools.items():
            await self._same_names(name, set(pool.ids), force=spec.force)
        for index in self._frontends.indices:
            await self._frontends.replace(index)
            await progress.did(f"frontend-{index}")

    async def _same_names(self, pool: str, names: set[str], *, force: bool) -> None:
        """Replace the engine with a new name by one with a predecessor's name.

        The first successor runs beside all its predecessors, so its number is a new one; the number of the last
        predecessor is free in the end. Without this each restart would shift the names in every chart by one.
        """
        now = set((await self._fleet.connector.pools())[pool].ids)
        if len(now) == len(names):  # else the pool was scaled meanwhile
            for worker in sorted(now - names):
                await self._replace(pool, worker, force=force)

    async def _replace(self, pool: str, worker: str, *, force: bool) -> None:
        """Replace one engine by a new one.

        Raises:
            EngineError: the new engine does not start; the old one goes on.
            ConnectorError: there is no room for a successor, and requests would be refused meanwhile.
        """
        operator = self._operator
        there = (await self._fleet.connector.pools())[pool]
        if worker not in there.ids:
            return  # it left meanwhile
        before = set(there.ids)
        successor_first = there.limit is None or operator.desired_replicas(pool) + 1 <= there.limit
        if not successor_first and operator.desired_replicas(pool) < 2 and not force:
            raise ConnectorError(
                f"{worker} is its pool's last engine, and no GPU is free for a successor: requests would be refused",
                hint="'penstock restart --force' does it all the same",
            )
        try:
            if successor_first:
                operator.surge[pool] = 1
                await operator.apply(pool)
                await self._until(pool, before, lambda now: now.ready >= operator.desired_replicas(pool) + 1)
            else:
                operator.surge[pool] = -1
            operator.retiring.add(worker)
            if successor_first:
                del operator.surge[pool]
            await operator.apply(pool)
            await self._until(pool, before, lambda now: worker not in now.ids)
        finally:
            operator.surge.pop(pool, None)
            operator.retiring.discard(worker)
            await operator.apply(pool)
        await self._until(pool, before - {worker}, lambda now: now.ready >= operator.desired_replicas(pool))

    async def _until(self, pool: str, before: set[str], met: Callable[[Pool], bool]) -> None:
        """Wait for a state of a pool.

        Raises:
            EngineError: an engine that was not there before can't be started.
        """
        async for pools in self._fleet.connector.watch():
            now = pools[pool]
            if met(now):
                return
            for replica in now.replicas or ():
                if replica.state == "failed" and replica.id not in before:
                    raise EngineError(f"{replica.id} does not start: {replica.reason}")


class _RestartProgress:
    def __init__(self, store: Store, revision: str, ttl: float) -> None:
        self.left = 0
        self._store = store
        self._revision = revision
        self._ttl = ttl
        self._done: list[str] = []

    async def did(self, name: str) -> None:
        self._done.append(name)
        self.left -= 1
        await self.report("running")

    async def report(self, state: str, problem: str | None = None) -> None:
        report = RestartStatus(
            revision=self._revision,
            state=state,  # type: ignore[arg-type]
            done=tuple(self._done),
            left=self.left,
            problem=problem,
        )
        while True:
            try:
                await put(self._store, RESTARTED, report, ttl=self._ttl)
                return
            except StoreUnavailable as error:
                log.warning("the status of the restart can't be written: %s", error)
                if state == "running":
                    return
                await asyncio.sleep(RETRY)
