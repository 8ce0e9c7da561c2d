"""Child process of a supervisor: start, first line on standard output, log, and an end that leaves no orphans."""

import asyncio
import ctypes
import json
import logging
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.adapters.connectors.shim_client import ending, tail
from penstock.kernel.errors import EngineError

log = logging.getLogger("penstock.children")

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
