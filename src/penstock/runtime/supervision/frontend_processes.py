"""Frontend processes: started, watched, restarted, drained, and replaced without losing a request.

The supervisor binds the addresses and the processes inherit them: a connection that waits to be accepted outlives the
process that would have accepted it, so a crash or a replacement refuses no client.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock import extension
from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.listen_address import bind
from penstock.config.settings.cluster_settings import START_TIMEOUT, ClusterSettings
from penstock.kernel.errors import ConfigError, bind_hint
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision.child_process import ChildProcess, RestartedChild, secrets_of

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
        self._children: dict[int, RestartedChild] = {}
        self._retired: set[ChildProcess] = set()
        self._retiring = BackgroundTasks()

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
            self._admin = _bind_port("127.0.0.1", self.settings.frontend.admin_port, shared=False)
        for index in self.indices:
            await self.unpark(index)

    async def stop(self, hurry: asyncio.Event, cut: Callable[[], None]) -> None:
        """Let frontends finish streams, then end them; when ``hurry`` is set, call ``cut`` and end them at once."""
        watched = await asyncio.gather(*(child.release() for child in self._children.values()))
        await self._retiring.close()
        self._close_all()
        grace = self.settings.supervise.drain_timeout + self.settings.supervise.stop_grace
        children = [*(child for child in watched if child is not None), *self._retired]
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
        parked = self._children.pop(index, None)
        if parked is None:
            return True
        child = await parked.release()
        self._close(index)  # our copy: the process closes its own when it stops accepting
        if child is None:
            return True
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
        if index in self._children or index not in self.indices:
            return
        child = self._children[index] = RestartedChild(
            f"frontend {index}",
            "other frontends get its connections",
            lambda: self.settings.supervise,
            partial(self._start, index),
            crashed=partial(self._crashes.add, f"frontend-{index}", "frontend"),
            failed=partial(self._failed, index),
            waits=partial(self._hold, index),
        )
        child.begin()

    async def replace(self, index: int) -> None:
        """Replace a process: the new one accepts before the old one stops accepting, and the old one finishes.

        Raises:
            PenstockError: the new one does not come up; the old one goes on.
        """
        child = self._children.get(index)
        if child is None:
            return  # parked
        new = await self._start(index)
        try:
            await new.ready(self.settings.supervise.start_timeout or START_TIMEOUT)
            old = await child.release()
        except BaseException:
            await new.stop(self.settings.supervise.stop_grace)
            raise
        child.begin(new)
        if old is None:
            return
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
        words = ["--run", str(self._run), "--index", str(index), "--listen", _socket_descriptors(sockets)]
        return await ChildProcess.start(
            f"frontend-{index}",
            self._module(),
            [*words, "--listen-admin", _socket_descriptors(self._admin)],
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

    def _failed(self, index: int, error: Exception) -> None:
        """End the cluster where a frontend can't even start for the first time."""
        if self._children[index].served:
            self._crashes.add(f"frontend-{index}", "frontend", "could not be started")
        else:
            self._gave_up(str(error))

    def _hold(self, index: int, wait: float) -> None:
        """Let connections wait for a frontend that comes back soon, and refuse them where that takes longer."""
        if wait > HOLD_MAX:
            self._close(index)

    # --- addresses --------------------------------------------------------------------------------------------------

    def _open(self, index: int) -> list[socket.socket]:
        known = self._sockets.get(index)
        if known is not None:
            return known
        frontend = self.settings.frontend
        # Several processes have one socket each; the kernel spreads the connections over them.
        made = self._sockets[index] = _bind_port(frontend.host, self._port, shared=frontend.processes > 1)
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


def _bind_port(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    try:
        return bind(host, port, shared=shared)
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} can't be bound: {error.strerror or error}",
            hint=bind_hint(error, "choose one with --frontend.port, 0 takes any free one"),
        ) from error


def _socket_descriptors(sockets: list[socket.socket]) -> str:
    return ",".join(str(bound.fileno()) for bound in sockets)
