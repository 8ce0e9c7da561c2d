"""Reconciler: follows the desired state of pools, drains and roles in the store, and makes the fleet match it."""

import asyncio
import logging
import time

import msgspec

from penstock.adapters.seams import ConnectorError, Store, StoreUnavailable
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import WorkerId
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    DRAINED,
    DRAINS,
    PLANNER,
    POOLS,
    ROLES,
    DrainSpec,
    DrainStatus,
    PoolSpec,
    PoolStatus,
    RoleSpec,
    decode,
    put,
)
from penstock.runtime.cluster_state.store_watch import RETRY, follow
from penstock.runtime.supervision.drain_wait import report_drain
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock.runtime.supervision.frontend_processes import FrontendProcesses

log = logging.getLogger("penstock.fleet")


class Reconciler:
    """Scaling, draining and roles of one supervisor's pools. Specs for pools and workers of others are left to them.

    Args:
        ttl: seconds after which the reports go when this process dies.
        frontends: processes that can be drained, where this supervisor runs them.
    """

    def __init__(
        self, store: Store, fleet: EngineFleet, *, ttl: float, frontends: FrontendProcesses | None = None
    ) -> None:
        self.surge: dict[str, int] = {}
        """Pool -> replicas above the desired ones, while a restart replaces some."""
        self.retiring: set[str] = set()
        """Workers that a restart takes out."""
        self._store = store
        self._fleet = fleet
        self._frontends = frontends
        self._ttl = ttl
        self._specs: dict[str, PoolSpec] = {}
        self._drains: dict[str, DrainSpec] = {}
        self._roles: dict[str, RoleSpec] = {}
        self._flips: dict[str, asyncio.Lock] = {}
        """Held while a worker changes its role."""
        self._initial: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._reported: dict[str, PoolStatus] = {}
        self._changing: set[asyncio.Task[None]] = set()
        self._frontends_free = asyncio.Lock()
        """Held while a frontend is drained or started: the next change of it waits."""

    async def run(self) -> None:
        """Follow until cancelled."""
        self._initial = {name: pool.desired for name, pool in (await self._fleet.connector.pools()).items()}
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow_pools())
                    group.create_task(self._follow_drains())
                    group.create_task(self._follow_roles())
                    group.create_task(self._report())
            except Exception:  # supervision boundary: specs must not be ignored for the rest of the run
                log.exception("desired state could not be followed by a bug of ours; it is read again")
                await asyncio.sleep(RETRY)

    def desired_replicas(self, pool: str) -> int:
        """Return how many replicas a pool should have, without the drained ones."""
        spec = self._specs.get(pool)
        base = self._initial[pool] if spec is None else spec.replicas
        if spec is not None and spec.by == PLANNER:
            return base
        return max(0, base - len(self._out(pool)))

    async def apply(self, pool: str) -> None:
        """Set a pool's desired state at the connector.

        Raises:
            ConnectorError: it can't be reached.
        """
        without = {*self._out(pool), *(worker for worker in self.retiring if self._is_of(worker, pool))}
        await self._fleet.connector.scale(pool, self.desired_replicas(pool) + self.surge.get(pool, 0), without=without)

    # --- specs ------------------------------------------------------------------------------------------------------

    async def _follow_pools(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec, pool = decode(PoolSpec, raw), key.removeprefix(DESIRED)
            if spec is None or pool not in self._initial or self._specs.get(pool) == spec:
                return
            log.info("pool %s should have %d replicas, set by %s", pool, spec.replicas, spec.by or "an operator")
            self._specs[pool] = spec
            self._fleet.patience[pool] = spec.timeout
            await self._try(pool)

        async def deleted(key: str) -> None:
            pool = key.removeprefix(DESIRED)
            if self._specs.pop(pool, None) is not None:
                self._fleet.patience.pop(pool, None)
                await self._try(pool)

        await follow(
            self._store,
            DESIRED,
            known=lambda: [DESIRED + pool for pool in self._specs],
            put=changed,
            deleted=deleted,
            frozen=_ignored,
        )

    async def _follow_drains(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec, name = decode(DrainSpec, raw), key.removeprefix(DRAINS)
            if spec is None or self._drains.get(name) == spec:
                return
            self._drains[name] = spec
            await self._drains_changed(name)

        async def deleted(key: str) -> None:
            name = key.removeprefix(DRAINS)
            if self._drains.pop(name, None) is not None:
                await self._drains_changed(name)

        await follow(
            self._store,
            DRAINS,
            known=lambda: [DRAINS + name for name in self._drains],
            put=changed,
            deleted=deleted,
            frozen=_ignored,
        )

    async def _follow_roles(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec, name = decode(RoleSpec, raw), key.removeprefix(ROLES)
            if spec is None or self._roles.get(name) == spec:
                return
            self._roles[name] = spec
            self._flip(name)

        async def deleted(key: str) -> None:
            name = key.removeprefix(ROLES)
            if self._roles.pop(name, None) is not None:
                self._flip(name)

        await follow(
            self._store,
            ROLES,
            known=lambda: [ROLES + name for name in self._roles],
            put=changed,
            deleted=deleted,
            frozen=_ignored,
        )

    def _flip(self, name: str) -> None:
        ours = any(self._is_of(name, pool) for pool in self._initial)
        if ours or any(server.worker == name for server in self._fleet.servers):
            task = asyncio.create_task(self._flipped(name), name=f"flip-{name}")
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)

    async def _flipped(self, name: str) -> None:
        """Give a worker the role that is desired once it is its turn: a newer spec may have come meanwhile."""
        async with self._flips.setdefault(name, asyncio.Lock()):
            spec = self._roles.get(name)
            role, timeout = (None, None) if spec is None else (spec.role, spec.timeout)
            try:
                await self._fleet.flip(WorkerId(name), role, timeout)
            except PenstockError as error:
                log.error("%s does not change its role: %s", name, error)
            self._fleet.changed.set()

    async def _drains_changed(self, name: str) -> None:
        spec = self._drains.get(name)
        index = _index_of(name)
        if index is not None:
            task = asyncio.create_task(self._frontend_changed(name, index, spec), name=f"drain-{name}")
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)
            return
        for server in self._fleet.servers:
            if server.worker == name:
                if spec is not None:
                    self._fleet.drains[name] = spec
                    await server.park()
                    if server.card is None:  # no request runs on a server that is away
                        report = DrainStatus(name=name, state="done", revision=spec.revision)
                        await report_drain(self._store, report, self._ttl)
                else:
                    await server.unpark()
                    await self._forget(name)
                self._fleet.changed.set()
                return
        for pool in self._initial:
            if self._is_of(name, pool):
                if spec is not None:
                    self._fleet.drains[name] = spec
                else:
                    await self._forget(name)
                await self._try(pool)
                return

    async def _frontend_changed(self, name: str, index: int, spec: DrainSpec | None) -> None:
        if self._frontends is None:
            return
        async with self._frontends_free:
            try:
                await self._change_frontend(name, index, spec)
            except (PenstockError, OSError) as error:
                log.error("%s can't be drained or started: %s", name, error)

    async def _change_frontend(self, name: str, index: int, spec: DrainSpec | None) -> None:
        assert self._frontends is not None
        if spec is None:
            await self._frontends.unpark(index)
            await self._forget(name)
            return
        started = time.monotonic()
        report = DrainStatus(name=name, state="draining", revision=spec.revision)
        await report_drain(self._store, report, self._ttl)
        await self._frontends.park(index)
        seconds = time.monotonic() - started
        await report_drain(self._store, msgspec.structs.replace(report, state="done", seconds=seconds), self._ttl)

    async def _forget(self, name: str) -> None:
        self._fleet.drains.pop(name, None)
        try:
            await self._store.delete(DRAINED + name)
        except StoreUnavailable as error:
            log.warning("the report on the drain of %s stays: %s", name, error)

    def _out(self, pool: str) -> set[str]:
        """Return the drained workers of a pool: for a later scaling they count no more."""
        spec = self._specs.get(pool)
        since = 0.0 if spec is None or spec.by == PLANNER else spec.at
        return {name for name, drain in self._drains.items() if self._is_of(name, pool) and drain.at > since}

    def _is_of(self, worker: str, pool: str) -> bool:
        base, dash, number = worker.rpartition("-")
        return bool(dash) and base == pool and number.isdigit()

    async def _try(self, pool: str) -> None:
        try:
            await self.apply(pool)
            self._problems.pop(pool, None)
        except ConnectorError as error:
            log.error("pool %s: %s", pool, error)
            self._problems[pool] = str(error)
        self._fleet.changed.set()

    # --- reports ----------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Keep the pools' status in the store up to date."""
        while True:
            self._fleet.changed.clear()
            try:
                for name, status in (await self._fleet.reports()).items():
                    spec = self._specs.get(name)
                    pool = msgspec.structs.replace(status.pool, problem=self._problems.get(name))
                    revision = None if spec is None else spec.revision
                    report = msgspec.structs.replace(status, pool=pool, revision=revision)
                    if self._reported.get(name) != report:
                        await put(self._store, POOLS + name, report, ttl=self._ttl)
                        self._reported[name] = report
            except StoreUnavailable as error:
                log.warning("the status of the pools can't be written: %s", error)
                await asyncio.sleep(RETRY)
                continue
            await self._fleet.changed.wait()


def _index_of(name: str) -> int | None:
    """Return 1 for ``frontend-1``."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "frontend" and number.isdigit() else None


def _ignored(error: StoreUnavailable | None) -> None:
    """A store that can't be read changes no spec: the last one still counts."""
