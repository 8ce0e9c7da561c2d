"""Child process of a supervisor: start, first line on standard output, log, restarts, an end that leaves no orphans.

A `RestartedChild` is started again whenever it ends: frontends, the planner, tier and weight processes.
Those beside engines come from the seam ``child``: an entry is called with an `EngineSite` and returns the
`EngineChildren` of one kind, such as all tier processes.
"""

import asyncio
import ctypes
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.connectors.shim_client import ending, tail
from penstock.adapters.engines.launch import EngineAddition
from penstock.adapters.seams import Store
from penstock.adapters.task_cancel import end
from penstock.config.derived.knobs import derive
from penstock.config.settings.cluster_settings import START_TIMEOUT, ClusterSettings, PoolSettings, SuperviseSettings
from penstock.fleet.crash_backoff import crash_wait
from penstock.kernel.errors import EngineError, PenstockError
from penstock.runtime.cluster_state.crash_log import CrashBook

log = logging.getLogger("penstock.supervisor")

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Request SIGTERM from the kernel when the parent dies, however it dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildProcess:
    """One child process: its first line on standard output is JSON and means that it is ready."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path, since: int = 0) -> None:
        self.name = name
        self._since = since
        self.process = process
        self.log_path = log_path
        self._drain: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str],
        sockets: Sequence[socket.socket] = (),
    ) -> "ChildProcess":
        """Start ``python -m module arguments`` in a session of its own, so that Ctrl-C reaches only the parent.

        Args:
            sockets: the child inherits them, under the same descriptors.
        """
        with log_path.open("ab") as stderr:
            since = stderr.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=dict(env),
                start_new_session=True,
                pass_fds=[given.fileno() for given in sockets],
                preexec_fn=_die_with_parent,
            )
        return cls(name, process, log_path, since)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self, timeout: float) -> dict[str, Any]:
        """Wait for the child's first line.

        Raises:
            EngineError: it ended, printed something else, or took longer than ``timeout`` seconds; the message has the
                end of its log.
        """
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout)
            report = json.loads(line)
        except TimeoutError:
            raise EngineError(
                f"{self.name} was not ready within {timeout:g} s", hint=tail(self.log_path, self._since)
            ) from None
        except ValueError:
            code = await self._code()
            problem = "said nothing" if code is None else ending(code)
            raise EngineError(f"{self.name} {problem} at its start", hint=tail(self.log_path, self._since)) from None
        self._drain = asyncio.create_task(self._copy())
        if not isinstance(report, dict):
            raise EngineError(
                f"{self.name} said {line!r} instead of where it listens", hint=tail(self.log_path, self._since)
            )
        return report

    async def wait(self) -> int:
        """Wait for the child's end and return the exit status (below 0: the signal)."""
        return await self.process.wait()

    async def stop(self, grace: float) -> bool:
        """Signal the child to end, kill it after ``grace`` seconds; return whether it ended by itself."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), grace)
            clean = True
        except TimeoutError:
            log.warning("%s did not end within %g s and is killed", self.name, grace)
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
            clean = False
        if self._drain is not None:
            await asyncio.gather(self._drain, return_exceptions=True)
        return clean

    async def _copy(self) -> None:
        """Copy its later output to its log, so that a full pipe never blocks it."""
        assert self.process.stdout is not None
        while chunk := await self.process.stdout.read(65_536):
            try:
                with self.log_path.open("ab") as file:
                    file.write(chunk)
            except OSError as error:
                log.warning("the output of %s can't be logged: %s", self.name, error)

    async def _code(self) -> int | None:
        try:
            return await asyncio.wait_for(self.process.wait(), 2.0)
        except TimeoutError:
            return None


class RestartedChild:
    """One child process that is started again after waits that grow: `begin`, then `stop` or `release`.

    Args:
        name: such as "the planner", for the log.
        without: what is so while there is none, for the log.
        settings: returns those that count now.
        start: starts it.
        patience: seconds until it is ready; None takes supervise.start_timeout.
        crashed: takes the words for how it ended.
        failed: takes the error of a start.
        waits: takes the seconds until the next start.
    """

    def __init__(
        self,
        name: str,
        without: str,
        settings: Callable[[], SuperviseSettings],
        start: Callable[[], Awaitable[ChildProcess]],
        *,
        patience: float | None = None,
        crashed: Callable[[str], object] = lambda ending: None,
        failed: Callable[[Exception], object] = lambda error: None,
        waits: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._name, self._without = name, without
        self._settings = settings
        self._start = start
        self._patience = patience
        self._crashed, self._failed, self._waits = crashed, failed, waits
        self._watcher: asyncio.Task[None] | None = None
        self._child: asyncio.Future[ChildProcess] | None = None
        """The newest, also while it is being started."""
        self._stopping = BackgroundTasks()
        """Goes on where the caller of `stop` is cancelled."""
        self.served = False
        """Whether one ever worked."""

    def begin(self, working: ChildProcess | None = None) -> None:
        """Keep it running from now on; ``working`` is one that is ready already."""
        if self._watcher is None:
            self._child = asyncio.ensure_future(self._start() if working is None else _at_once(working))
            self._watcher = asyncio.create_task(self._watch(working is not None), name=self._name)

    async def release(self) -> ChildProcess | None:
        """Watch it no longer and return it as it is, once it is started; None where there is none."""
        if self._watcher is not None:
            await end((self._watcher,))  # one cancel is not enough: `asyncio.wait_for` may lose it
        self._watcher, child = None, self._child
        if child is None:
            return None
        await asyncio.wait((child,))
        self._child = None
        return child.result() if child.exception() is None else None

    async def stop(self) -> None:
        """End it; one that is being started is not left behind."""
        self._stopping.spawn(self._end())
        await self._stopping.settled()

    async def _end(self) -> None:
        child = await self.release()
        if child is not None:
            await child.stop(self._settings().stop_grace)

    async def _watch(self, ready: bool) -> None:
        wait, reason = 0.0, ""
        while True:
            began: float | None = None
            assert self._child is not None
            try:
                child = await asyncio.shield(self._child)
                if not ready:
                    await child.ready(self._patience or self._settings().start_timeout or START_TIMEOUT)
                began, reason = time.monotonic(), ""
                self.served = True
                status = await child.wait()
                self._crashed(ending(status))
                log.error("%s %s; %s meanwhile", self._name, ending(status), self._without)
            except (PenstockError, OSError) as error:
                # The same reason at each try is said once, and again where it changes.
                level, reason = (logging.DEBUG if reason == str(error) else logging.ERROR), str(error)
                log.log(level, "%s can't be started, so %s: %s", self._name, self._without, error)
                self._failed(error)
                if self._child.exception() is None:
                    await self._child.result().stop(self._settings().stop_grace)
            ready = False
            ran = 0.0 if began is None else time.monotonic() - began
            wait = crash_wait(wait, ran, self._settings().restart_backoff)
            self._waits(wait)
            await asyncio.sleep(wait)
            self._child = asyncio.ensure_future(self._start())


async def _at_once(child: ChildProcess) -> ChildProcess:
    return child


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """This machine, as the place of engines and of what runs beside them.

    Args:
        settings: as they are now.
        state, namespace: folder of the supervisor's state file, and its name in there.
        logs: folder for their logs.
        env: theirs, with the cluster's secret where there is one.
        host: address on which other machines reach them.
        ttl: seconds after which what they put into the store goes when this process dies.
    """

    settings: Callable[[], SuperviseSettings]
    state: Path
    namespace: str
    logs: Path
    env: Mapping[str, str]
    host: str
    crashes: CrashBook
    store: Store
    ttl: float


class EngineChildren(Protocol):
    """All processes of one kind: `add` each pool, `begin`, then `stop`."""

    def add(self, base: str, model: str, pool: PoolSettings) -> None:
        """Know a pool whose workers are called ``base-0`` and so on.

        Raises:
            ConfigError: it asks for what this machine has not.
        """
        ...

    def addition(self, worker: str, pool: PoolSettings) -> EngineAddition | None:
        """Return what the start of an engine needs; None where none is beside it.

        Raises:
            ConfigError: the engine's environment lacks what it needs.
        """
        ...

    def begin(self) -> None:
        """Start those that do not wait for an engine."""
        ...

    def spawned(self, worker: str, base: str, number: int) -> None:
        """Run one beside an engine that starts, the ``number``-th of its pool; it outlives restarts of the engine."""
        ...

    def forgotten(self, worker: str, base: str) -> None:
        """End that of an engine which is gone for good."""
        ...

    async def stop(self) -> None:
        """End all of them."""
        ...
