"""Shim client of a supervisor: starts or adopts one engine through its shim, reads its reports, ends it."""

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.adapters.connectors.engine_process import LaunchSpec
from penstock.kernel.errors import EngineError

log = logging.getLogger("penstock.connector")

KEEPER = Path(__file__).with_name("shim.py")
CONNECT_LIMIT = 10.0
"""Seconds that a shim may take to listen; it takes a hundredth of a second on an idle machine."""
ELSEWHERE = "root cause above"
"""What vLLM's server says of its core, whose own words scroll out of the last lines."""
EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception): .+")
LOST = -signal.SIGKILL
"""Status of an engine whose shim was killed, so that no process observed how it ended."""


class ShimClient:
    """One engine process and the connection to its shim; made by `start` or `adopt`."""

    def __init__(
        self, name: str, lease: str, log_path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        self.lease = lease
        self.log_path = log_path
        self.pid = 0
        self.shim = 0
        self._reader = reader
        self._writer = writer
        self._process: asyncio.subprocess.Process | None = None
        loop = asyncio.get_running_loop()
        self._first_line: asyncio.Future[Any] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._hearing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, name: str, launch: LaunchSpec, *, log_path: Path, grace: float, end: float, env: Mapping[str, str]
    ) -> "ShimClient":
        """Start an engine in a session of its own, so that Ctrl-C reaches only this process.

        Args:
            grace: seconds that it outlives this process where no other adopts it.
            end: seconds that it then gets to end by itself.
            env: of the engine, before ``launch.env``.
        Raises:
            EngineError: its shim did not come up.
        """
        lease = f"penstock-{secrets.token_hex(16)}"
        says = "1" if launch.url is None else "0"
        words = ["-I", "-S", str(KEEPER), lease, str(grace), str(end), str(log_path), says, *launch.argv]
        with log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**env, **launch.env},
                start_new_session=True,
            )
        end_at = asyncio.get_running_loop().time() + CONNECT_LIMIT
        wait = 0.005
        while (made := await cls._connect(name, lease, log_path)) is None:
            if process.returncode is not None or asyncio.get_running_loop().time() > end_at:
                if process.returncode is None:
                    process.kill()
                await process.wait()
                raise EngineError(f"{name} could not be started", hint=tail(log_path))
            await asyncio.sleep(wait)
            wait = min(0.1, wait * 2)
        made._process = process
        return made

    @classmethod
    async def adopt(cls, name: str, lease: str, log_path: Path) -> "ShimClient | None":
        """Adopt an engine of a supervisor that is gone; return None where the engine is gone too."""
        return await cls._connect(name, lease, log_path)

    @classmethod
    async def _connect(cls, name: str, lease: str, log_path: Path) -> "ShimClient | None":
        try:
            reader, writer = await asyncio.open_unix_connection("\0" + lease)
        except OSError:
            return None
        made = cls(name, lease, log_path, reader, writer)
        try:
            status = json.loads(await asyncio.wait_for(reader.readline(), CONNECT_LIMIT))
        except (OSError, ValueError, TimeoutError):
            writer.close()
            return None
        made.pid, made.shim = int(status["pid"]), int(status["shim"])
        made._apply_status(status)
        made._hearing = asyncio.create_task(made._hear(), name=f"shim-{name}")
        return made

    async def first_line(self, timeout: float) -> dict[str, Any]:
        """Wait for the engine's first line.

        Raises:
            EngineError: it ended, printed something else, or took longer than ``timeout`` seconds; the message has the
                end of its log.
        """
        await asyncio.wait({self._first_line, self._ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._first_line.done():
            report = self._first_line.result()
            if isinstance(report, dict):
                return report
            raise EngineError(f"{self.name} said {report!r} instead of where it listens", hint=tail(self.log_path))
        if self._ended.done():
            raise EngineError(f"{self.name} {ending(self._ended.result())} at its start", hint=tail(self.log_path))
        raise EngineError(f"{self.name} was not ready within {timeout:g} s", hint=tail(self.log_path))

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> int:
        """Wait for the engine's end and return the exit status (below 0: the signal)."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace: float) -> bool:
        """Signal the engine to end, kill it after ``grace`` seconds; return whether it ended by itself."""
        if not self._ended.done():
            try:
                self._writer.write(json.dumps({"stop": grace}).encode() + b"\n")
                await self._writer.drain()
            except OSError:
                pass  # the shim is gone; `_hear` ends the engine
        status = await asyncio.shield(self._ended)
        self._writer.close()
        if self._process is not None:
            await self._process.wait()
        return status != LOST

    async def _hear(self) -> None:
        try:
            while line := await self._reader.readline():
                self._apply_status(json.loads(line))
        except OSError as error:
            log.warning("the shim of %s can't be heard: %s", self.name, error)
        if not self._ended.done():
            await self._bereaved()
        self._writer.close()

    def _apply_status(self, status: dict[str, Any]) -> None:
        if status["said"] is not None and not self._first_line.done():
            self._first_line.set_result(status["said"])
        if status["ended"] is not None and not self._ended.done():
            self._ended.set_result(int(status["ended"]))

    async def _bereaved(self) -> None:
        """The shim was killed: the engine got SIGTERM from the kernel; make sure that it ends."""
        log.warning("the shim of %s is gone; the engine is ended", self.name)
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 60.0)):
            end = time.monotonic() + patience
            if _signal(self.pid, number):
                while time.monotonic() < end:
                    if not _process_runs(self.pid):
                        break
                    await asyncio.sleep(0.05)
        self._ended.set_result(LOST)


def _signal(group: int, number: int) -> bool:
    """Signal a process group of ours; return whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _process_runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ending(status: int) -> str:
    """Describe how a process ended, such as ``was killed by SIGKILL``; ``status``: below 0 it is a signal's number."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def tail(path: Path, since: int = 0) -> str:
    """Return the last lines of a log, for a message; before them the cause, where they say that it stands above.

    Args:
        since: bytes of earlier processes at its beginning, which are left out.
    """
    try:
        lines = path.read_bytes()[since:].decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    end = " | ".join(lines[-4:]) or "nothing"
    if ELSEWHERE in end:
        raised = (match for line in reversed(lines) if ELSEWHERE not in line and (match := EXCEPTION.search(line)))
        end = next((f"{match.group()} [...] {end}" for match in raised), end)
    return f"the end of its log {path}: {end}"
