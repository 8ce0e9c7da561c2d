"""Frontend processes: started, watched, restarted, drained, and replaced without losing a request.

The supervisor binds the addresses and the processes inherit them: a connection that waits to be accepted outlives the
process that would have accepted it, so a crash or a replacement refuses no client.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import extension
from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.connectors.shim_client import ending
from penstock.adapters.listen_address import bind
from penstock.adapters.task_cancel import cancel_all
from penstock.config.derived.knobs import derive
from penstock.config.settings.cluster_settings import START_TIMEOUT, ClusterSettings
from penstock.fleet.crash_backoff import crash_wait
from penstock.kernel.errors import ConfigError, PenstockError, bind_hint
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision.child_process import ChildProcess

log = logging.getLogger("penstock.supervisor")

RETIRE = signal.SIGUSR1
"""Signal to a frontend whose successor accepts the new connections."""
FRONTEND = "penstock.frontend.frontend_process"
"""Modules that run as a frontend process: a picker is one that listens for a gateway, too."""
HOLD_MAX = 1.0
"""Seconds that connections wait for a frontend that crashed. Where its restart takes longer they are refused, so that a
load balancer in front learns of it, and another of several frontends gets them."""


class FrontendProcesses:
    """All frontend processes of a cluster.

    Args:
        run: the run folder.
        gave_up: called with the reason where a frontend could not even start; the cluster then ends.
        crashes: record of the frontends that crashed.
    """

    def __init__(
        self, settings: ClusterSettings, run: Path, gave_up: Callable[[str], None], crashes: CrashBook
    ) -> None:
        self.settings = settings
        self._run = run
        self._gave_up = gave_up
        self._crashes = crashes
        self._port = settings.frontend.port
        self._sockets: dict[int, list[socket.socket]] = {}
        self._admin: list[socket.socket] = []
        self._children: dict[int, ChildProcess] = {}
        self._ready: dict[int, asyncio.Event] = {}
        """Set while the process of that index accepts requests."""
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()
        """Held while a process is started and while watchers are ended, so that none is started without a watcher."""
        self._retired: set[ChildProcess] = set()
        self._retiring = BackgroundTasks()
        self._stopping = False

    @property
    def indices(self) -> range:
        return range(self.settings.frontend.processes)

    async def start(self) -> None:
        """Start all frontends; they are ready when their cards are in the store.

        Raises:
            ConfigError: the address can't be bound.
        """
        for index in self.indices:
            self._open(index)
        if self.settings.frontend.admin_port is not None:
            self._admin = _bound("127.0.0.1", self.settings.frontend.admin_port, shared=False)
        for index in self.indices:
            self._ready[index] = asyncio.Event()
            self._children[index] = await self._start(index)
            self._watchers[index] = asyncio.create_task(self._watch(index), name=f"frontend-{index}")

    async def stop(self, hurry: asyncio.Event, cut: Callable[[], None]) -> None:
        """Let frontends finish streams, then end them; when ``hurry`` is set, call ``cut`` and end them at once."""
        self._stopping = True
        async with self._starting:
            await cancel_all([*self._watchers.values(), *self._retiring])
        self._close_all()
        grace = self.settings.supervise.drain_timeout + self.settings.supervise.stop_grace
        children = [*self._children.values(), *self._retired]
        drain = asyncio.gather(*(child.stop(grace) for child in children))
        hurried = asyncio.create_task(hurry.wait())
        either: set[asyncio.Future[Any]] = {drain, hurried}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            cut()
            for child in children:
                if child.process.returncode is None:
                    child.process.kill()
        await drain
        hurried.cancel()

    async def park(self, index: int) -> bool:
        """Drain one frontend while others serve, and do not start it again; return whether it ended by itself."""
        watcher = self._watchers.pop(index, None)
        if watcher is None:
            return True
        async with self._starting:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        self._ready[index].clear()
        self._close(index)  # our copy: the process closes its own when it stops accepting
        child = self._children.pop(index)
        if child.process.returncode is None:
            child.process.send_signal(RETIRE)
        try:
            await asyncio.wait_for(child.wait(), self.settings.supervise.drain_timeout)
        except TimeoutError:
            await child.stop(self.settings.supervise.stop_grace)
            return False
        return await child.stop(self.settings.supervise.stop_grace)

    async def unpark(self, index: int) -> None:
        """Start a parked frontend again."""
        if index in self._watchers or index not in self.indices:
            return
        async with self._starting:
            self._children[index] = await self._start(index)
        self._watchers[index] = asyncio.create_task(self._watch(index), name=f"frontend-{index}")

    async def replace(self, index: int) -> None:
        """Replace a process: the new one accepts before the old one stops accepting, and the old one finishes.

        Raises:
            PenstockError: the new one does not come up; the old one goes on.
        """
        watcher = self._watchers.get(index)
        if watcher is None:
            return  # parked
        new = await self._start(index)
        try:
            await new.ready(self.settings.supervise.start_timeout or START_TIMEOUT)
            async with self._starting:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
        except BaseException:
            await new.stop(self.settings.supervise.stop_grace)
            raise
        old = self._children[index]
        self._children[index] = new
        self._watchers[index] = asyncio.create_task(self._watch(index, ready=True), name=f"frontend-{index}")
        if old.process.returncode is None:
            old.process.send_signal(RETIRE)
        self._retired.add(old)
        self._retiring.spawn(self._bury(old), f"retired-{old.pid}")

    @property
    def retired(self) -> int:
        """Processes that were replaced and still finish streams."""
        return len(self._retired)

    async def _bury(self, child: ChildProcess) -> None:
        status = await child.wait()
        self._retired.discard(child)
        log.info("a replaced frontend (process %d) has finished with status %s", child.pid, status)

    async def _start(self, index: int) -> ChildProcess:
        sockets = self._open(index)
        words = ["--run", str(self._run), "--index", str(index), "--listen", _descriptors(sockets)]
        return await ChildProcess.start(
            f"frontend-{index}",
            self._module(),
            [*words, "--listen-admin", _descriptors(self._admin)],
            log_path=self._run / "logs" / f"frontend-{index}.log",
            env={**os.environ, **secrets_of(self.settings)},
            sockets=[*sockets, *self._admin],
        )

    def _module(self) -> str:
        """Return the module of a frontend process: another one where a gateway in front carries the requests."""
        if getattr(self.settings.picker, "kind", None) is None:
            return FRONTEND
        picker: str = extension.entry("frontend process", "picker", "picker.kind")
        return picker

    async def _watch(self, index: int, *, ready: bool = False) -> None:
        """Restart a frontend that ends; a frontend that can't even start ends the cluster with its reason."""
        wait = 0.0
        ever_ready = ready
        while not self._stopping:
            child = self._children[index]
            began: float | None = None
            try:
                if not ready:
                    await child.ready(self.settings.supervise.start_timeout or START_TIMEOUT)
                ever_ready, began = True, time.monotonic()
                self._ready[index].set()
            except PenstockError as error:
                if not ever_ready:
                    self._gave_up(str(error))
                    return
                log.error("%s", error)
            ready = False
            status = await child.wait()
            self._ready[index].clear()
            if self._stopping:
                return
            self._crashes.add(f"frontend-{index}", "frontend", ending(status))
            ran = 0.0 if began is None else time.monotonic() - began
            wait = crash_wait(wait, ran, self.settings.supervise.restart_backoff)
            log.info("frontend %d %s; it restarts in %.1f s", index, ending(status), wait)
            if wait > HOLD_MAX:
                self._close(index)
            await asyncio.sleep(wait)
            try:
                async with self._starting:
                    self._children[index] = await self._start(index)
            except ConfigError as error:
                log.error("frontend %d can't be restarted: %s", index, error)

    # --- addresses --------------------------------------------------------------------------------------------------

    def _open(self, index: int) -> list[socket.socket]:
        known = self._sockets.get(index)
        if known is not None:
            return known
        frontend = self.settings.frontend
        # Several processes have one socket each; the kernel spreads the connections over them.
        made = self._sockets[index] = _bound(frontend.host, self._port, shared=frontend.processes > 1)
        self._port = made[0].getsockname()[1]
        return made

    def _close(self, index: int) -> None:
        for bound in self._sockets.pop(index, ()):
            bound.close()

    def _close_all(self) -> None:
        for index in list(self._sockets):
            self._close(index)
        for bound in self._admin:
            bound.close()


def _bound(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    try:
        return bind(host, port, shared=shared)
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} can't be bound: {error.strerror or error}",
            hint=bind_hint(error, "choose one with --frontend.port, 0 takes any free one"),
        ) from error


def _descriptors(sockets: list[socket.socket]) -> str:
    return ",".join(str(bound.fileno()) for bound in sockets)


def secrets_of(settings: ClusterSettings) -> dict[str, str]:
    """Return the secrets for a child's environment: the run folder's config.yaml has none."""
    secrets = {}
    for knob in derive(ClusterSettings):
        if knob.knob.secret and not knob.is_mapping and "*" not in knob.path:
            value: Any = settings
            for name in knob.path:
                value = getattr(value, name)
            if value:
                plain = value if isinstance(value, str | dict) else list(value)
                secrets[knob.env] = plain if isinstance(plain, str) else json.dumps(plain)
    return secrets
