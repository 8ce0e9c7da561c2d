"""Lifecycle of one replica: start or adopt, serve, restart after a crash with back-off, drain, end."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.adapters.connectors.engine_port import free_port
from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate, LaunchSpec, ReplicaHooks
from penstock.adapters.connectors.gpu_inventory import GpuAllocator
from penstock.adapters.connectors.shim_client import ShimClient, ending, tail
from penstock.adapters.connectors.state_file import Resources, StateEntry, StateFile
from penstock.config.settings.cluster_settings import RESTART_BACKOFF_MAX, SuperviseSettings
from penstock.kernel.errors import EngineError, PenstockError
from penstock.kernel.values import Replica, ReplicaState

log = logging.getLogger("penstock.connector")

ANSWERS_EVERY = 0.2
"""Seconds between checks of an engine that does not report by itself when it is ready."""

T = TypeVar("T")


@dataclass
class ReplicaDeps:
    """What all replicas of a connector share.

    ``grace``: seconds that engines outlive a supervisor that was killed; ``end``: seconds that they then get to end.
    """

    settings: SuperviseSettings
    state: StateFile
    care: ReplicaHooks
    gpus: GpuAllocator
    logs: Path
    env: Mapping[str, str]
    grace: float
    end: float
    news: Callable[[], None] = lambda: None
    restarts: int = 0
    adopted: list[str] = field(default_factory=list)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine gave GPUs back."""


class SurvivingEngine(NamedTuple):
    """An engine of a supervisor that was killed."""

    entry: StateEntry
    shim: ShimClient

    @property
    def resources(self) -> Resources:
        return self.entry.resources or Resources()


class ReplicaLifecycle:
    """One replica from the moment it is desired to its end; `run` carries that out."""

    def __init__(
        self,
        means: ReplicaDeps,
        pool: str,
        template: EngineTemplate,
        number: int,
        survivor: SurvivingEngine | None = None,
    ) -> None:
        self.worker = template.worker(number)
        self.number = number
        self.state: ReplicaState = "starting"
        self.reason: str | None = None
        self.keep_running = True
        self.created_at = time.monotonic()
        self.resources = Resources() if survivor is None else survivor.resources
        self.task: asyncio.Task[None] | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the replica served for the first time, or could not."""
        self.first.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._means = means
        self._pool = pool
        self._template = template
        self._survivor = survivor
        self._shim: ShimClient | None = None if survivor is None else survivor.shim
        self._engine: EngineProcess | None = None
        self._turned = asyncio.Event()
        """Set when ``wanted`` changed."""

    @property
    def shown(self) -> Replica:
        pid = None if self._shim is None else self._shim.pid
        return Replica(id=self.worker, state=self.state, reason=self.reason, pid=pid, gpus=self.resources.gpus)

    @property
    def may_stay(self) -> bool:
        """True while an ending replica can still be kept."""
        return self.state != "stopping"

    def want(self, wanted: bool) -> None:
        if wanted != self.keep_running:
            self.keep_running = wanted
            self._turned.set()

    async def run(self) -> None:
        """Keep an engine running while it is wanted: a crash is followed by a restart with back-off."""
        means = self._means
        wait = means.settings.restart_backoff
        while self.keep_running:
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
                self.reason = ending(status)
                means.restarts += 1
                if time.monotonic() - started > RESTART_BACKOFF_MAX:
                    wait = means.settings.restart_backoff
                means.care.crashed(self.worker, self.reason)
            except Exception as error:  # noqa: BLE001  # supervision boundary: the care of an engine never ends unseen
                self._failed(error)
                means.care.crashed(self.worker, f"could not be started ({self.reason})")
            await self._end()
            self._become("failed")
            log.error("engine %s %s; it is started again in %.1f s", self.worker, self.reason, wait)
            await self._while_wanted(asyncio.sleep(wait))
            wait = min(RESTART_BACKOFF_MAX, wait * 2)
        self.state = "stopping"
        await self._end()
        means.gpus.give(self.resources.gpus)
        means.freed.set()
        means.state.remove(self._template.component, self.number)
        self.first.cancel()

    async def cut(self, grace: float) -> None:
        """End the replica within ``grace`` seconds, without a report to the routers."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        if self._shim is not None:
            await self._shim.stop(grace)

    def _become(self, state: ReplicaState) -> None:
        self.state = state
        self._means.news()

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, PenstockError | OSError):
            log.exception("engine %s failed by a bug of ours", self.worker)
        self.reason = str(error)
        if not self.first.done():
            failure = error if isinstance(error, PenstockError) else EngineError(f"{self.worker}: {error}")
            self.first.set_exception(failure)

    # --- start ------------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> EngineProcess:
        self._become("starting")
        means, number, component = self._means, self.number, self._template.component
        survivor, self._survivor = self._survivor, None
        if survivor is None:
            self.resources = Resources(gpus=await self._gpus(), port=free_port())
        launch = self._template.launch(self.worker, self.resources.port, self.resources.gpus)
        if survivor is None:
            log_path = means.logs / f"{self.worker}.log"
            shim = self._shim = await self._spawn(launch, log_path)
            entry = StateEntry(
                command=list(launch.argv),
                lease=shim.lease,
                pid=shim.pid,
                resources=self.resources,
                worker=self.worker,
                card=launch.card,
                log=str(log_path),
            )
            means.state.put(component, number, entry)
        else:
            entry, shim = survivor
        url = entry.url or await self._url(shim, launch)
        engine = EngineProcess(self.worker, self._pool, url, shim.pid, entry.card)
        await means.care.replica_ready(engine)
        self._engine = engine
        means.state.put(component, number, msgspec.structs.replace(entry, url=url))
        if survivor is not None:
            means.adopted.append(self.worker)
            log.info("engine %s with process %d was taken over", self.worker, shim.pid)
        self.reason = None
        self._become("ready")
        return engine

    async def _gpus(self) -> tuple[int, ...]:
        count, gpus = self._template.gpus, self._means.gpus
        if len(self.resources.gpus) == count:
            return self.resources.gpus  # it had these GPUs before its crash
        while (taken := gpus.take(count)) is None:
            self.reason = f"waits for {count} GPUs; {gpus.free} are free"
            self._means.news()
            self._means.freed.clear()
            await self._means.freed.wait()
        return taken

    async def _spawn(self, launch: LaunchSpec, log_path: Path) -> ShimClient:
        means, env = self._means, dict(self._means.env)
        if self.resources.gpus:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them
        start = ShimClient.start(self.worker, launch, log_path=log_path, grace=means.grace, end=means.end, env=env)
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._shim = await starting  # else its process would have no owner
            raise

    async def _url(self, shim: ShimClient, launch: LaunchSpec) -> str:
        """Wait until a started engine serves, and return its URL."""
        timeout = self._means.settings.start_timeout or launch.start_timeout
        if launch.url is None:
            report = await shim.first_line(timeout)
            if not isinstance(report.get("url"), str):
                raise EngineError(f"{shim.name} did not say where it listens", hint=tail(shim.log_path))
            return str(report["url"])
        end = time.monotonic() + timeout
        while (lack := await self._means.care.missing(launch.url)) is not None:
            self.reason = lack
            self._means.news()
            if shim.ended:
                status = await shim.wait()
                raise EngineError(f"{shim.name} {ending(status)} at its start", hint=tail(shim.log_path))
            if time.monotonic() > end:
                raise EngineError(f"{shim.name} was not ready within {timeout:g} s: {lack}", hint=tail(shim.log_path))
            await asyncio.sleep(ANSWERS_EVERY)
        return launch.url

    # --- serve and end ----------------------------------------------------------------------------------------------

    async def _serve(self, engine: EngineProcess) -> int | None:
        """Wait for an engine's end; return its status, or None where it may be ended because it is not wanted."""
        assert self._shim is not None
        ended = asyncio.ensure_future(self._shim.wait())
        while True:
            leaving: asyncio.Future[None] | None = None
            if not self.keep_running:
                self._become("draining")
                leaving = asyncio.ensure_future(self._means.care.leave(engine))
            try:
                await _first(ended, self._turned, leaving)
                if ended.done():
                    return ended.result() if self.keep_running else None
                if leaving is not None and leaving.done():
                    leaving.result()
                    self._become("stopping")
                    return None
            finally:
                if leaving is not None:
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)
            self._turned.clear()
            if self.keep_running and self.state == "draining":
                await self._means.care.replica_ready(engine)  # the engine stays after all
                self._become("ready")

    async def _end(self) -> None:
        """End the rest of the process; the routers learn of a crash before that, of an orderly end after it."""
        shim, engine, self._engine = self._shim, self._engine, None
        crashed = shim is not None and shim.ended
        if engine is not None and crashed:
            await self._means.care.replica_ended(engine)
        if shim is not None:
            await shim.stop(self._means.settings.stop_grace)
            self._shim = None
        if engine is not None and not crashed:
            await self._means.care.replica_ended(engine)

    async def _while_wanted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await some work; cancel it and return None when the replica is not desired any more."""
        task = asyncio.ensure_future(work)
        try:
            while self.keep_running and not task.done():
                self._turned.clear()
                await _first(task, self._turned)
            return task.result() if task.done() else None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _first(*things: "asyncio.Future[Any] | asyncio.Event | None") -> None:
    """Wait until one of some futures and events is done; the futures are not cancelled."""
    waits = [asyncio.ensure_future(thing.wait()) for thing in things if isinstance(thing, asyncio.Event)]
    futures = [thing for thing in things if isinstance(thing, asyncio.Future)]
    try:
        await asyncio.wait([*futures, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
