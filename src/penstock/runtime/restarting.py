"""How is a whole cluster replaced without losing a request? Engine by engine, then frontend by frontend.

A successor is started before its forerunner is drained wherever the machine has room for it. Where it has not, because
every GPU is taken, the forerunner is drained first; a pool's last engine is only replaced so when that was asked for.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.adapters.seams import ConnectorError, PoolScale, Store, StoreUnavailable
from penstock.kernel.errors import EngineError, PenstockError
from penstock.runtime.fleet import Fleet
from penstock.runtime.follow import RETRY, follow
from penstock.runtime.frontends import Frontends
from penstock.runtime.operator import Operator
from penstock.runtime.wishes import RESTART, RESTARTED, RestartReport, RestartWish, decode, put

log = logging.getLogger("penstock.supervisor")


class Restarter:
    """Follow the wish for a restart, and carry it out once for each new wish.

    Args:
        ttl: seconds after which the report goes when this process dies.
    """

    def __init__(self, store: Store, operator: Operator, fleet: Fleet, frontends: Frontends, *, ttl: float) -> None:
        self._store = store
        self._operator = operator
        self._fleet = fleet
        self._frontends = frontends
        self._ttl = ttl
        self._wish: RestartWish | None = None
        self._wished = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._work())

    async def _follow(self) -> None:
        async def came(key: str, raw: bytes) -> None:
            wish = decode(RestartWish, raw)
            if wish is not None and wish != self._wish:
                self._wish = wish
                self._wished.set()

        async def gone(key: str) -> None:
            pass  # what was begun is finished

        await follow(self._store, RESTART, known=lambda: (), put=came, gone=gone, frozen=lambda error: None)

    async def _work(self) -> None:
        while True:
            await self._wished.wait()
            self._wished.clear()
            wish = self._wish
            assert wish is not None
            log.info("every engine and every frontend is replaced, wished by %s", wish.by or "somebody")
            progress = _Progress(self._store, wish.revision, self._ttl)
            try:
                await self._restart(wish, progress)
                await progress.say("done")
            except (PenstockError, OSError) as error:
                log.error("the restart stops: %s", error)
                await progress.say("failed", str(error))
            except Exception as error:  # supervision boundary: the next wish for a restart must be heard
                log.exception("the restart stops by a bug of ours")
                await progress.say("failed", f"{type(error).__name__}: {error}")

    async def _restart(self, wish: RestartWish, progress: "_Progress") -> None:
        pools = await self._fleet.connector.pools()
        engines = [(pool, replica.id) for pool, scale in pools.items() for replica in scale.replicas]
        progress.left = len(engines) + len(self._frontends.indices)
        await progress.say("running")
        for pool, worker in engines:
            await self._replace(pool, worker, force=wish.force)
            await progress.did(worker)
        for index in self._frontends.indices:
            await self._frontends.replace(index)
            await progress.did(f"frontend-{index}")

    async def _replace(self, pool: str, worker: str, *, force: bool) -> None:
        """Put a new engine in the place of one.

        Raises:
            EngineError: the new one does not start; the old one goes on.
            ConnectorError: there is no room for a successor, and requests would be refused meanwhile.
        """
        operator = self._operator
        scale = (await self._fleet.connector.pools())[pool]
        if not any(replica.id == worker for replica in scale.replicas):
            return  # it went in the meantime
        before = {replica.id for replica in scale.replicas}
        successor_first = scale.limit is None or operator.wished(pool) + 1 <= scale.limit
        if not successor_first and operator.wished(pool) < 2 and not force:
            raise ConnectorError(
                f"{worker} is its pool's last engine, and no GPU is free for a successor: requests would be refused",
                hint="'penstock restart --force' does it all the same",
            )
        try:
            if successor_first:
                operator.surge[pool] = 1
                await operator.apply(pool)
                await self._until(pool, before, lambda now: now.ready >= operator.wished(pool) + 1)
            else:
                operator.surge[pool] = -1
            operator.retiring.add(worker)
            if successor_first:
                del operator.surge[pool]
            await operator.apply(pool)
            await self._until(pool, before, lambda now: all(replica.id != worker for replica in now.replicas))
        finally:
            operator.surge.pop(pool, None)
            operator.retiring.discard(worker)
            await operator.apply(pool)
        await self._until(pool, before - {worker}, lambda now: now.ready >= operator.wished(pool))

    async def _until(self, pool: str, before: set[str], met: Callable[[PoolScale], bool]) -> None:
        """Wait for a state of a pool.

        Raises:
            EngineError: an engine that was not there before can't be started.
        """
        async for pools in self._fleet.connector.watch():
            now = pools[pool]
            if met(now):
                return
            for replica in now.replicas:
                if replica.state == "failed" and replica.id not in before:
                    raise EngineError(f"{replica.id} does not start: {replica.reason}")


class _Progress:
    def __init__(self, store: Store, revision: str, ttl: float) -> None:
        self.left = 0
        self._store = store
        self._revision = revision
        self._ttl = ttl
        self._done: list[str] = []

    async def did(self, name: str) -> None:
        self._done.append(name)
        self.left -= 1
        await self.say("running")

    async def say(self, state: str, problem: str | None = None) -> None:
        report = RestartReport(
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
                log.warning("how the restart goes can't be said: %s", error)
                if state == "running":
                    return
                await asyncio.sleep(RETRY)
