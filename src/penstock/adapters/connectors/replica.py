"""What is the life of one replica? Started or taken over, served, restarted after a crash, drained, ended."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.adapters.connectors.engine import Care, Engine, LaunchLike, Template
from penstock.adapters.connectors.gpus import Gpus
from penstock.adapters.connectors.kept import Kept, tail
from penstock.adapters.connectors.ports import free_port
from penstock.adapters.connectors.state_file import Resources, StateEntry, StateFile
from penstock.adapters.seams import Replica, ReplicaState
from penstock.config.cluster import SuperviseSettings
from penstock.kernel.errors import EngineError, PenstockError

log = logging.getLogger("penstock.connector")

ANSWERS_EVERY = 0.2
"""Seconds between looks at an engine that does not say by itself when it is ready."""

T = TypeVar("T")


@dataclass
class Means:
    """What all replicas of a connector share.

    ``grace``: seconds that engines outlive a supervisor that was killed; ``end``: seconds that they then get to end.
    """

    settings: SuperviseSettings
    state: StateFile
    care: Care
    gpus: Gpus
    logs: Path
    env: Mapping[str, str]
    grace: float
    end: float
    news: Callable[[], None] = lambda: None
    restarts: int = 0
    adopted: list[str] = field(default_factory=list)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when GPUs were given back."""


class Survivor(NamedTuple):
    """An engine of a supervisor that was killed."""

    entry: StateEntry
    kept: Kept

    @property
    def resources(self) -> Resources:
        return self.entry.resources or Resources()


class Life:
    """One replica from the wish for it to its end; `run` lives it."""

    def __init__(
        self, means: Means, pool: str, template: Template, number: int, survivor: Survivor | None = None
    ) -> None:
        self.worker = template.worker(number)
        self.number = number
        self.state: ReplicaState = "starting"
        self.reason: str | None = None
        self.wanted = True
        self.born = time.monotonic()
        self.resources = Resources() if survivor is None else survivor.resources
        self.task: asyncio.Task[None] | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it served for the first time, or could not."""
        self.first.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._means = means
        self._pool = pool
        self._template = template
        self._survivor = survivor
        self._kept: Kept | None = None if survivor is None else survivor.kept
        self._engine: Engine | None = None
        self._turned = asyncio.Event()
        """Set when ``wanted`` changed."""

    @property
    def shown(self) -> Replica:
        pid = None if self._kept is None else self._kept.pid
        return Replica(self.worker, self.state, self.reason, pid, self.resources.gpus)

    @property
    def may_stay(self) -> bool:
        """True while it is not too late to want it after all."""
        return self.state != "stopping"

    def want(self, wanted: bool) -> None:
        if wanted != self.wanted:
            self.wanted = wanted
            self._turned.set()

    async def run(self) -> None:
        """Keep an engine running while it is wanted: a crash is followed by a restart with back-off."""
        means = self._means
        wait = means.settings.restart_backoff
        while self.wanted:
            started = time.monotonic()
            try:
                engine = await self._while_wanted(self._bring_up())
                if engine is None:
                    break
                if not self.first.done():
                    self.first.set_result(None)
                status = await self._serve(engine)
                if status is None:
                    break
                self.reason = f"ended with status {status}"
                means.restarts += 1
                if time.monotonic() - started > means.settings.restart_backoff_max:
                    wait = means.settings.restart_backoff
            except Exception as error:  # noqa: BLE001  # supervision boundary: looking after one engine must never end unseen
                self._failed(error)
            await self._end()
            self._become("failed")
            log.error("engine %s: %s; it is started again in %.1f s", self.worker, self.reason, wait)
            await self._while_wanted(asyncio.sleep(wait))
            wait = min(means.settings.restart_backoff_max, wait * 2)
        self.state = "stopping"
        await self._end()
        means.gpus.give(self.resources.gpus)
        means.freed.set()
        means.state.remove(self._template.component, self.number)
        self.first.cancel()

    async def cut(self, grace: float) -> None:
        """End it without a word to the routers, within ``grace`` seconds."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        if self._kept is not None:
            await self._kept.stop(grace)

    def _become(self, state: ReplicaState) -> None:
        self.state = state
        self._means.news()

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, PenstockError | OSError):
            log.exception("engine %s failed by a bug of ours", self.worker)
        self.reason = str(error)
        if not self.first.done():
            told = error if isinstance(error, PenstockError) else EngineError(f"{self.worker}: {error}")
            self.first.set_exception(told)

    # --- up ---------------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> Engine:
        self._become("starting")
        means, number, component = self._means, self.number, self._template.component
        survivor, self._survivor = self._survivor, None
        if survivor is None:
            self.resources = Resources(gpus=await self._gpus(), port=free_port())
        launch = self._template.launch(self.worker, self.resources.port, self.resources.gpus)
        if survivor is None:
            log_path = means.logs / f"{self.worker}.log"
            kept = self._kept = await self._spawn(launch, log_path)
            entry = StateEntry(
                command=list(launch.argv),
                lease=kept.lease,
                pid=kept.pid,
                resources=self.resources,
                worker=self.worker,
                card=launch.card,
                log=str(log_path),
            )
            means.state.put(component, number, entry)
        else:
            entry, kept = survivor
        url = entry.url or await self._url(kept, launch)
        engine = Engine(self.worker, self._pool, url, kept.pid, entry.card)
        await means.care.came(engine)
        self._engine = engine
        means.state.put(component, number, msgspec.structs.replace(entry, url=url))
        if survivor is not None:
            means.adopted.append(self.worker)
            log.info("engine %s with process %d was taken over", self.worker, kept.pid)
        self.reason = None
        self._become("ready")
        return engine

    async def _gpus(self) -> tuple[int, ...]:
        count, gpus = self._template.gpus, self._means.gpus
        if len(self.resources.gpus) == count:
            return self.resources.gpus  # it had them before its crash
        while (taken := gpus.take(count)) is None:
            self.reason = f"waits for {count} GPUs; {gpus.free} are free"
            self._means.news()
            self._means.freed.clear()
            await self._means.freed.wait()
        return taken

    async def _spawn(self, launch: LaunchLike, log_path: Path) -> Kept:
        means, env = self._means, dict(self._means.env)
        if self.resources.gpus:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them
        start = Kept.start(self.worker, launch, log_path=log_path, grace=means.grace, end=means.end, env=env)
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._kept = await starting  # or its process would be nobody's
            raise

    async def _url(self, kept: Kept, launch: LaunchLike) -> str:
        """Wait until a started engine serves, and return where."""
        timeout = launch.start_timeout or self._means.settings.start_timeout
        if launch.url is None:
            said = await kept.said(timeout)
            if not isinstance(said.get("url"), str):
                raise EngineError(f"{kept.name} did not say where it listens", hint=tail(kept.log_path))
            return str(said["url"])
        end = time.monotonic() + timeout
        while (lack := await self._means.care.lacks(launch.url)) is not None:
            self.reason = lack
            self._means.news()
            if kept.ended:
                status = await kept.wait()
                raise EngineError(f"{kept.name} ended at start with status {status}", hint=tail(kept.log_path))
            if time.monotonic() > end:
                raise EngineError(f"{kept.name} was not ready within {timeout:g} s: {lack}", hint=tail(kept.log_path))
            await asyncio.sleep(ANSWERS_EVERY)
        return launch.url

    # --- running, and down ------------------------------------------------------------------------------------------

    async def _serve(self, engine: Engine) -> int | None:
        """Wait for an engine's end; return its status, or None where it may be ended because it is not wanted."""
        assert self._kept is not None
        ended = asyncio.ensure_future(self._kept.wait())
        while True:
            leaving: asyncio.Future[None] | None = None
            if not self.wanted:
                self._become("draining")
                leaving = asyncio.ensure_future(self._means.care.leave(engine))
            try:
                await _first(ended, self._turned, leaving)
                if ended.done():
                    return ended.result() if self.wanted else None
                if leaving is not None and leaving.done():
                    leaving.result()
                    self._become("stopping")
                    return None
            finally:
                if leaving is not None:
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)
            self._turned.clear()
            if self.wanted and self.state == "draining":
                await self._means.care.came(engine)  # it stays after all
                self._become("ready")

    async def _end(self) -> None:
        """End what there is of the process; the routers hear of a crash first, of an orderly end afterwards."""
        kept, engine, self._engine = self._kept, self._engine, None
        crashed = kept is not None and kept.ended
        if engine is not None and crashed:
            await self._means.care.gone(engine)
        if kept is not None:
            await kept.stop(self._means.settings.stop_grace)
            self._kept = None
        if engine is not None and not crashed:
            await self._means.care.gone(engine)

    async def _while_wanted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await something; give it up and return None when the replica is not wanted any more."""
        task = asyncio.ensure_future(work)
        try:
            while self.wanted and not task.done():
                self._turned.clear()
                await _first(task, self._turned)
            return task.result() if task.done() else None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _first(*things: "asyncio.Future[Any] | asyncio.Event | None") -> None:
    """Wait until one of some futures and events is there; the futures are left alone."""
    waits = [asyncio.ensure_future(thing.wait()) for thing in things if isinstance(thing, asyncio.Event)]
    futures = [thing for thing in things if isinstance(thing, asyncio.Future)]
    try:
        await asyncio.wait([*futures, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
