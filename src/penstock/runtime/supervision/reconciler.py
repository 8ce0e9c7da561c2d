"""Reconciler: follows the desired state in the store, tells the fleet, and writes down what the pools are."""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.fleet.events import Desired, DrainDesired, DrainDropped, RestartDesired, RoleDesired
from penstock.kernel.errors import PenstockError
from penstock.kernel.machine import Event
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    DRAINED,
    DRAINS,
    PLANNER,
    POOLS,
    RESTART,
    ROLES,
    DrainSpec,
    DrainStatus,
    PoolSpec,
    PoolStatus,
    RestartSpec,
    RoleSpec,
    decode,
    put,
)
from penstock.runtime.cluster_state.store_watch import RETRY, follow
from penstock.runtime.supervision.engine_fleet import EngineFleet, Frontends

log = logging.getLogger("penstock.fleet")

EVERY = 0.2
"""Seconds between two reports: each names all replicas of a pool, so that one for each event of many would cost the
square of their number."""


class Reconciler:
    """Desired state of one supervisor's pools, workers and frontends; that of others is left to them.

    Args:
        ttl: seconds after which the reports go when this process dies.
        frontends: processes that can be drained, where this supervisor runs them.
        noted: called with what is desired now: its key, the former and the new value, and who desires it.
    """

    def __init__(
        self,
        store: Store,
        fleet: EngineFleet,
        *,
        ttl: float,
        frontends: Frontends | None = None,
        noted: Callable[[str, object, object, str], None] = lambda key, old, new, by: None,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._frontends = frontends
        self._ttl = ttl
        self._noted = noted
        self._specs: dict[str, PoolSpec] = {}
        self._drains: dict[str, DrainSpec] = {}
        self._roles: dict[str, RoleSpec] = {}
        self._restart: RestartSpec | None = None
        self._reported: dict[str, PoolStatus] = {}
        self._changing = BackgroundTasks()
        self._frontends_free = asyncio.Lock()
        """Held while a frontend is drained or started: the next change of it waits."""

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow_pools())
                    group.create_task(self._follow_drains())
                    group.create_task(self._follow_roles())
                    if self._frontends is not None:  # who joined a cluster is not its supervisor
                        group.create_task(self._follow_restart())
                    group.create_task(self._report())
            except Exception:  # supervision boundary: specs must not be ignored for the rest of the run
                log.exception("desired state could not be followed by a bug of ours; it is read again")
                await asyncio.sleep(RETRY)

    # --- specs ------------------------------------------------------------------------------------------------------

    async def _follow_pools(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec, pool = decode(PoolSpec, raw), key.removeprefix(DESIRED)
            if spec is None or not self._scales(pool) or self._specs.get(pool) == spec:
                return
            log.info("pool %s should have %d replicas, set by %s", pool, spec.replicas, spec.by or "an operator")
            self._noted(f"scale {pool}", self._fleet.driver.fleet.state.pools[pool].goal, spec.replicas, spec.by)
            self._specs[pool] = spec
            by_planner = spec.by == PLANNER
            self._post(
                Desired(pool=pool, replicas=spec.replicas, by_planner=by_planner, at=spec.at, timeout=spec.timeout)
            )
            problem = self._fleet.driver.fleet.state.pools[pool].problem
            if problem is not None:
                log.error("pool %s: %s", pool, problem)

        async def deleted(key: str) -> None:
            pool = key.removeprefix(DESIRED)
            if self._specs.pop(pool, None) is not None:
                self._post(Desired(pool=pool, replicas=None))

        await follow(
            self._store,
            DESIRED,
            known=lambda: [DESIRED + pool for pool in self._specs],
            put=changed,
            deleted=deleted,
            frozen=_keep_last_spec,
        )

    async def _follow_drains(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec, name = decode(DrainSpec, raw), key.removeprefix(DRAINS)
            if spec is None or self._drains.get(name) == spec:
                return
            self._drains[name] = spec
            if self._has(name):
                self._noted(f"drain {name}", False, True, spec.by)
            if (index := _index_of(name)) is not None:
                self._frontend_drained(name, index, spec)
            else:
                self._post(DrainDesired(worker=name, at=spec.at, timeout=spec.timeout, revision=spec.revision))

        async def deleted(key: str) -> None:
            name = key.removeprefix(DRAINS)
            spec = self._drains.pop(name, None)
            if spec is None:
                return
            if self._has(name):
                self._noted(f"drain {name}", True, False, spec.by)
            if (index := _index_of(name)) is not None:
                self._frontend_drained(name, index, None)
            else:
                self._post(DrainDropped(worker=name))

        await follow(
            self._store,
            DRAINS,
            known=lambda: [DRAINS + name for name in self._drains],
            put=changed,
            deleted=deleted,
            frozen=_keep_last_spec,
        )

    async def _follow_roles(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec, name = decode(RoleSpec, raw), key.removeprefix(ROLES)
            if spec is None or self._roles.get(name) == spec:
                return
            if self._has(name):
                before = self._roles.get(name)
                self._noted(f"flip {name}", None if before is None else before.role, spec.role, spec.by)
            self._roles[name] = spec
            self._post(RoleDesired(worker=name, role=spec.role, timeout=spec.timeout))

        async def deleted(key: str) -> None:
            name = key.removeprefix(ROLES)
            if self._roles.pop(name, None) is not None:
                self._post(RoleDesired(worker=name, role=None))

        await follow(
            self._store,
            ROLES,
            known=lambda: [ROLES + name for name in self._roles],
            put=changed,
            deleted=deleted,
            frozen=_keep_last_spec,
        )

    async def _follow_restart(self) -> None:
        async def changed(key: str, raw: bytes) -> None:
            spec = decode(RestartSpec, raw)
            if spec is None or spec == self._restart:
                return
            self._restart = spec
            self._noted("restart", None, spec.revision, spec.by)
            log.info("every engine and every frontend is replaced, requested by %s", spec.by or "an operator")
            assert self._frontends is not None
            frontends = tuple(self._frontends.indices)
            self._post(RestartDesired(revision=spec.revision, force=spec.force, frontends=frontends))

        async def deleted(key: str) -> None:
            pass  # a restart that has begun is finished

        await follow(self._store, RESTART, known=lambda: (), put=changed, deleted=deleted, frozen=_keep_last_spec)

    def _post(self, event: Event) -> None:
        self._fleet.post(event)
        self._fleet.changed.set()

    def _has(self, name: str) -> bool:
        """Return whether a worker or a frontend is one of this supervisor."""
        return name in self._fleet.driver.fleet.state.lives or (
            self._frontends is not None and _index_of(name) in self._frontends.indices
        )

    def _scales(self, pool: str) -> bool:
        """Return whether a pool is one of processes of this supervisor."""
        state = self._fleet.driver.fleet.state.pools.get(pool)
        return state is not None and not state.attached

    # --- frontends ----------------------------------------------------------------------------------------------------

    def _frontend_drained(self, name: str, index: int, spec: DrainSpec | None) -> None:
        self._changing.spawn(self._frontend_changed(name, index, spec), f"drain-{name}")

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
            await self._store.delete(DRAINED + name)
            return
        started = time.monotonic()
        report = DrainStatus(name=name, state="draining", revision=spec.revision)
        await self._report_drain(report)
        await self._frontends.park(index)
        await self._report_drain(msgspec.structs.replace(report, state="done", seconds=time.monotonic() - started))

    async def _report_drain(self, report: DrainStatus) -> None:
        """Write a drain's report; a store that can't be written costs the report, not the drain."""
        try:
            await put(self._store, DRAINED + report.name, report, ttl=self._ttl)
        except StoreUnavailable as error:
            log.warning("the status of the drain of %s can't be written: %s", report.name, error)

    # --- reports ----------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Keep the pools' status in the store up to date."""
        while True:
            self._fleet.changed.clear()
            try:
                for name, status in self._fleet.reports().items():
                    spec = self._specs.get(name)
                    report = msgspec.structs.replace(status, revision=None if spec is None else spec.revision)
                    if self._reported.get(name) != report:
                        await put(self._store, POOLS + name, report, ttl=self._ttl)
                        self._reported[name] = report
            except StoreUnavailable as error:
                log.warning("the status of the pools can't be written: %s", error)
                await asyncio.sleep(RETRY)
                continue
            await asyncio.sleep(EVERY)
            await self._fleet.changed.wait()


def _index_of(name: str) -> int | None:
    """Return 1 for ``frontend-1``."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "frontend" and number.isdigit() else None


def _keep_last_spec(error: StoreUnavailable | None) -> None:
    """A store that can't be read changes no spec: the last one still counts."""
