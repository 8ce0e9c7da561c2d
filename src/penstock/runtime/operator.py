"""How does what operators wish come true? Follows the wishes in the store and works the fleet towards them."""

import asyncio
import logging
import time

import msgspec

from penstock.adapters.seams import ConnectorError, Store, StoreUnavailable
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import WorkerId
from penstock.runtime.draining import tell
from penstock.runtime.fleet import Fleet
from penstock.runtime.follow import RETRY, follow
from penstock.runtime.frontends import Frontends
from penstock.runtime.wishes import (
    DESIRED,
    DRAINED,
    DRAINS,
    PLANNER,
    POOLS,
    ROLES,
    DrainReport,
    DrainWish,
    PoolReport,
    PoolWish,
    RoleWish,
    decode,
    put,
)

log = logging.getLogger("penstock.fleet")


class Operator:
    """Scaling and draining of one supervisor's pools. Wishes for pools and workers of others are left to them.

    Args:
        ttl: seconds after which the reports go when this process dies.
        frontends: those that can be drained, where this supervisor runs them.
    """

    def __init__(self, store: Store, fleet: Fleet, *, ttl: float, frontends: Frontends | None = None) -> None:
        self.surge: dict[str, int] = {}
        """Pool -> replicas above what is wished, while a restart replaces some."""
        self.retiring: set[str] = set()
        """Workers that a restart takes out."""
        self._store = store
        self._fleet = fleet
        self._frontends = frontends
        self._ttl = ttl
        self._wishes: dict[str, PoolWish] = {}
        self._drains: dict[str, DrainWish] = {}
        self._roles: dict[str, RoleWish] = {}
        self._flips: dict[str, asyncio.Lock] = {}
        """Held while a worker changes its role."""
        self._initial: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._told: dict[str, PoolReport] = {}
        self._changing: set[asyncio.Task[None]] = set()
        self._frontends_free = asyncio.Lock()
        """Held while a frontend is drained or started: the next word on it waits."""

    async def run(self) -> None:
        """Follow until cancelled."""
        self._initial = {pool: scale.desired for pool, scale in (await self._fleet.connector.pools()).items()}
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow_pools())
                    group.create_task(self._follow_drains())
                    group.create_task(self._follow_roles())
                    group.create_task(self._report())
            except Exception:  # supervision boundary: wishes must not go unheard for the rest of the run
                log.exception("wishes could not be followed by a bug of ours; they are read again")
                await asyncio.sleep(RETRY)

    def wished(self, pool: str) -> int:
        """Return how many replicas a pool should have, those left out that are drained."""
        wish = self._wishes.get(pool)
        base = self._initial[pool] if wish is None else wish.replicas
        if wish is not None and wish.by == PLANNER:
            return base
        return max(0, base - len(self._out(pool)))

    async def apply(self, pool: str) -> None:
        """Say to the connector what should be.

        Raises:
            ConnectorError: it can't be.
        """
        without = {*self._out(pool), *(worker for worker in self.retiring if self._is_of(worker, pool))}
        await self._fleet.connector.scale(pool, self.wished(pool) + self.surge.get(pool, 0), without=without)

    # --- wishes -----------------------------------------------------------------------------------------------------

    async def _follow_pools(self) -> None:
        async def came(key: str, raw: bytes) -> None:
            wish, pool = decode(PoolWish, raw), key.removeprefix(DESIRED)
            if wish is None or pool not in self._initial or self._wishes.get(pool) == wish:
                return
            log.info("pool %s should have %d replicas, wished by %s", pool, wish.replicas, wish.by or "somebody")
            self._wishes[pool] = wish
            self._fleet.patience[pool] = wish.timeout
            await self._try(pool)

        async def gone(key: str) -> None:
            pool = key.removeprefix(DESIRED)
            if self._wishes.pop(pool, None) is not None:
                self._fleet.patience.pop(pool, None)
                await self._try(pool)

        await follow(
            self._store,
            DESIRED,
            known=lambda: [DESIRED + pool for pool in self._wishes],
            put=came,
            gone=gone,
            frozen=_ignored,
        )

    async def _follow_drains(self) -> None:
        async def came(key: str, raw: bytes) -> None:
            wish, name = decode(DrainWish, raw), key.removeprefix(DRAINS)
            if wish is None or self._drains.get(name) == wish:
                return
            self._drains[name] = wish
            await self._drains_changed(name)

        async def gone(key: str) -> None:
            name = key.removeprefix(DRAINS)
            if self._drains.pop(name, None) is not None:
                await self._drains_changed(name)

        await follow(
            self._store,
            DRAINS,
            known=lambda: [DRAINS + name for name in self._drains],
            put=came,
            gone=gone,
            frozen=_ignored,
        )

    async def _follow_roles(self) -> None:
        async def came(key: str, raw: bytes) -> None:
            wish, name = decode(RoleWish, raw), key.removeprefix(ROLES)
            if wish is None or self._roles.get(name) == wish:
                return
            self._roles[name] = wish
            self._flip(name)

        async def gone(key: str) -> None:
            name = key.removeprefix(ROLES)
            if self._roles.pop(name, None) is not None:
                self._flip(name)

        await follow(
            self._store,
            ROLES,
            known=lambda: [ROLES + name for name in self._roles],
            put=came,
            gone=gone,
            frozen=_ignored,
        )

    def _flip(self, name: str) -> None:
        ours = any(self._is_of(name, pool) for pool in self._initial)
        if ours or any(server.worker == name for server in self._fleet.servers):
            task = asyncio.create_task(self._flipped(name), name=f"flip-{name}")
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)

    async def _flipped(self, name: str) -> None:
        """Give a worker the role that is wished at the end of its turn: a newer wish may have come meanwhile."""
        async with self._flips.setdefault(name, asyncio.Lock()):
            wish = self._roles.get(name)
            role, timeout = (None, None) if wish is None else (wish.role, wish.timeout)
            try:
                await self._fleet.flip(WorkerId(name), role, timeout)
            except PenstockError as error:
                log.error("%s does not change its role: %s", name, error)
            self._fleet.changed.set()

    async def _drains_changed(self, name: str) -> None:
        wish = self._drains.get(name)
        index = _index_of(name)
        if index is not None:
            task = asyncio.create_task(self._frontend_changed(name, index, wish), name=f"drain-{name}")
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)
            return
        for server in self._fleet.servers:
            if server.worker == name:
                if wish is not None:
                    self._fleet.drains[name] = wish
                    await server.park()
                    if server.card is None:  # nothing runs on a server that is away
                        report = DrainReport(name=name, state="done", revision=wish.revision)
                        await tell(self._store, report, self._ttl)
                else:
                    await server.unpark()
                    await self._forget(name)
                self._fleet.changed.set()
                return
        for pool in self._initial:
            if self._is_of(name, pool):
                if wish is not None:
                    self._fleet.drains[name] = wish
                else:
                    await self._forget(name)
                await self._try(pool)
                return

    async def _frontend_changed(self, name: str, index: int, wish: DrainWish | None) -> None:
        if self._frontends is None:
            return
        async with self._frontends_free:
            try:
                await self._change_frontend(name, index, wish)
            except (PenstockError, OSError) as error:
                log.error("%s can't be drained or started: %s", name, error)

    async def _change_frontend(self, name: str, index: int, wish: DrainWish | None) -> None:
        assert self._frontends is not None
        if wish is None:
            await self._frontends.unpark(index)
            await self._forget(name)
            return
        started = time.monotonic()
        report = DrainReport(name=name, state="draining", revision=wish.revision)
        await tell(self._store, report, self._ttl)
        await self._frontends.park(index)
        seconds = time.monotonic() - started
        await tell(self._store, msgspec.structs.replace(report, state="done", seconds=seconds), self._ttl)

    async def _forget(self, name: str) -> None:
        self._fleet.drains.pop(name, None)
        try:
            await self._store.delete(DRAINED + name)
        except StoreUnavailable as error:
            log.warning("the report on the drain of %s stays: %s", name, error)

    def _out(self, pool: str) -> set[str]:
        """Return the workers of a pool that are drained: for a scaling that came later they count no more."""
        wish = self._wishes.get(pool)
        since = 0.0 if wish is None or wish.by == PLANNER else wish.at
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
        """Keep the pools' reports in the store up to date."""
        while True:
            self._fleet.changed.clear()
            try:
                for report in await self._fleet.reports():
                    wish = self._wishes.get(report.pool)
                    told = msgspec.structs.replace(
                        report,
                        revision=None if wish is None else wish.revision,
                        problem=self._problems.get(report.pool),
                    )
                    if self._told.get(report.pool) != told:
                        await put(self._store, POOLS + report.pool, told, ttl=self._ttl)
                        self._told[report.pool] = told
            except StoreUnavailable as error:
                log.warning("how the pools are can't be said: %s", error)
                await asyncio.sleep(RETRY)
                continue
            await self._fleet.changed.wait()


def _index_of(name: str) -> int | None:
    """Return 1 for ``frontend-1``."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "frontend" and number.isdigit() else None


def _ignored(error: StoreUnavailable | None) -> None:
    """A store that can't be read changes no wish: what was wished last still counts."""
