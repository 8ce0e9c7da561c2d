"""Which engines does this supervisor look after? Starts them, says in the store that they are there, restarts them.

An engine knows nothing of the cluster: the fleet asks it what it is and puts its card under ``workers/<id>``.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.adapters.engines.describe import describe, healthy
from penstock.adapters.seams import Store
from penstock.config.cluster import PoolSettings, SuperviseSettings
from penstock.kernel.errors import EngineError, PenstockError
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.runtime.children import Child
from penstock.runtime.membership import Entry, key_of

log = logging.getLogger("penstock.fleet")

HEALTH_EVERY = 2.0
"""Seconds between looks at an attached server."""
HEALTH_MISSES = 2
"""Misses in a row that take an attached server out."""


class Fleet:
    """The engines of this machine and the servers that were attached by URL.

    Args:
        logs: folder for the engines' logs.
        ttl: seconds after which the cards go away when this process dies.
    """

    def __init__(
        self, store: Store, settings: SuperviseSettings, *, logs: Path, ttl: float, env: Mapping[str, str] | None = None
    ) -> None:
        self.restarts = 0
        self._store = store
        self._settings = settings
        self._logs = logs
        self._ttl = ttl
        self._env = dict(os.environ if env is None else env)
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._children: dict[WorkerId, Child] = {}
        self._ready: dict[WorkerId, asyncio.Future[WorkerCard]] = {}
        self._stopping = False
        self._epoch = 0
        self._http: aiohttp.ClientSession | None = None

    def add_pool(self, model: str, name: str, pool: PoolSettings, *, prefix: str = "") -> list[WorkerId]:
        """Start looking after a pool's engines and URLs; return their ids. `ready` waits for them."""
        ids: list[WorkerId] = []
        base = f"{prefix}{name}"
        for number, url in enumerate(pool.urls):
            worker = WorkerId(f"{base}-{number}")
            self._adopt(worker, self._attached(worker, model, url, pool))
            ids.append(worker)
        if not pool.urls:
            for number in range(pool.replicas):
                worker = WorkerId(f"{base}-{number}")
                self._adopt(worker, self._child(worker, model, pool, number))
                ids.append(worker)
        return ids

    async def ready(self, timeout: float) -> list[WorkerCard]:
        """Wait for the first word of every engine.

        Raises:
            EngineError: one could not be started or reached; the message says which and why.
        """
        waiting = list(self._ready.values())
        if not waiting:
            return []
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        for future in waiting:
            if future.done():
                future.result()  # raises what kept it from starting
        late = sorted(worker for worker, future in self._ready.items() if not future.done())
        if late:
            raise EngineError(f"not ready within {timeout:g} s: {', '.join(late)}")
        return [future.result() for future in waiting]

    async def stop(self, grace: float) -> None:
        """Take every worker out of the store, then end the children; attached servers go on by themselves."""
        self._stopping = True
        for worker in list(self._tasks):
            await self._withdraw(worker)
        await asyncio.gather(*(child.stop(grace) for child in self._children.values()))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def _adopt(self, worker: WorkerId, care: Coroutine[Any, Any, None]) -> None:
        self._ready[worker] = asyncio.get_running_loop().create_future()
        self._tasks[worker] = asyncio.create_task(self._watched(worker, care), name=f"engine-{worker}")

    async def _watched(self, worker: WorkerId, care: Coroutine[Any, Any, None]) -> None:
        """Supervision boundary: looking after one engine must never end unseen."""
        try:
            await care
        except Exception as error:
            log.exception("engine %s is not looked after any more", worker)
            self._tell_failure(worker, EngineError(f"{worker}: {type(error).__name__}: {error}"))

    async def _child(self, worker: WorkerId, model: str, pool: PoolSettings, number: int) -> None:
        """Keep one engine process running: a crash is followed by a restart with back-off and a newer epoch."""
        wait = self._settings.restart_backoff
        while not self._stopping:
            started = time.monotonic()
            try:
                card = await self._start_child(worker, model, pool, number)
            except (PenstockError, OSError) as error:
                self._tell_failure(worker, error)
                if not self._ready[worker].done() or self._ready[worker].exception() is not None:
                    return  # it never worked: the supervisor ends with this error instead of trying for ever
                log.error("engine %s could not be restarted: %s", worker, error)
            else:
                if not self._ready[worker].done():
                    self._ready[worker].set_result(card)
                status = await self._children[worker].wait()
                await self._withdraw(worker)
                if self._stopping:
                    return
                self.restarts += 1
                if time.monotonic() - started > self._settings.restart_backoff_max:
                    wait = self._settings.restart_backoff
                log.error("engine %s ended with status %s; it restarts in %.1f s", worker, status, wait)
            await asyncio.sleep(wait)
            wait = min(self._settings.restart_backoff_max, wait * 2)

    async def _start_child(self, worker: WorkerId, model: str, pool: PoolSettings, number: int) -> WorkerCard:
        sim = pool.sim
        child = await Child.start(
            worker,
            "penstock.adapters.engines.sim.process",
            [
                "--model",
                model,
                "--port",
                "0",
                "--settings",
                json.dumps(msgspec.to_builtins(sim)),
            ],
            log_path=self._logs / f"{worker}.log",
            env=self._env,
        )
        self._children[worker] = child
        try:
            said = await child.ready(self._settings.start_timeout)
            card = await self._describe(
                worker,
                model,
                str(said["url"]),
                pool,
                pid=child.pid,
                engine="sim",
                max_seqs=sim.max_seqs,
                max_batched_tokens=sim.max_batched_tokens,
            )
            await self._announce(card)
        except BaseException:
            await child.stop(self._settings.stop_grace)
            raise
        return card

    async def _attached(self, worker: WorkerId, model: str, url: str, pool: PoolSettings) -> None:
        """Follow the health of a server that somebody else runs; in the store while it answers."""
        card: WorkerCard | None = None
        misses = 0
        while not self._stopping:
            if card is None:
                try:
                    card = await self._describe(worker, model, url, pool)
                    await self._announce(card)
                    misses = 0
                    if not self._ready[worker].done():
                        self._ready[worker].set_result(card)
                    log.info("server %s is there as %s", url, worker)
                except PenstockError as error:
                    if not self._ready[worker].done():
                        self._tell_failure(worker, error)
                        return
                    log.warning("server %s is away: %s", url, error)
            elif await healthy(self._client(), url):
                misses = 0
            else:
                misses += 1
                if misses >= HEALTH_MISSES:
                    log.warning("server %s does not answer its health check; %s is taken out", url, worker)
                    await self._withdraw(worker)
                    card = None
            await asyncio.sleep(HEALTH_EVERY)

    async def _describe(self, worker: WorkerId, model: str, url: str, pool: PoolSettings, **known: Any) -> WorkerCard:
        # A restarted engine must be newer than its former self, also after a restart of this process.
        self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
        overrides: dict[str, Any] = {"role": pool.role, "block_size": pool.block_size, "kv_blocks": pool.kv_blocks}
        overrides.update(max_len=pool.max_len, max_batched_tokens=pool.max_batched_tokens)
        overrides.update({key: value for key, value in known.items() if value is not None})
        return await describe(self._client(), url, worker=worker, epoch=self._epoch, model=model, overrides=overrides)

    async def _announce(self, card: WorkerCard) -> None:
        await self._store.put(key_of(card.id), msgspec.json.encode(Entry(card=card)), ttl=self._ttl)

    async def _withdraw(self, worker: WorkerId) -> None:
        try:
            await self._store.delete(key_of(worker))
        except PenstockError as error:
            log.warning("worker %s could not be taken out of the store: %s", worker, error)

    def _tell_failure(self, worker: WorkerId, error: Exception) -> None:
        future = self._ready[worker]
        if not future.done():
            future.set_exception(error)

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http
