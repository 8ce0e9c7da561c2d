"""A frontend that crashes is started again; its sockets stay open but in a crash loop."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import ClusterSettings, SuperviseSettings
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision import frontend_processes
from penstock.runtime.supervision.frontend_processes import FrontendProcesses

WAITS = SuperviseSettings(restart_backoff=0.001)
SETTINGS = ClusterSettings(frontend=FrontendSettings(port=0, processes=1), supervise=WAITS)


class Child:
    """A process that is ready at once and ends when it is told to."""

    pid = 1

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.process: Any = SimpleNamespace(returncode=None)

    async def ready(self, timeout: float) -> dict[str, Any]:
        return json.loads("{}")

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, grace: float) -> bool:
        return True


class Frontends:
    """Frontend processes whose children and clock are the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.children: asyncio.Queue[Child] = asyncio.Queue()
        monkeypatch.setattr(frontend_processes, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(frontend_processes.ChildProcess, "start", self._start)
        book = CrashBook(MemoryStore(MemorySpace()), 10.0)
        self.processes = FrontendProcesses(msgspec.structs.replace(SETTINGS), folder, lambda reason: None, book)

    async def _start(self, *arguments: Any, **more: Any) -> Child:
        child = Child()
        self.children.put_nowait(child)
        return child

    async def crash_after(self, seconds: float) -> bool:
        """Let the child work for so long and crash; return whether its successor gets the same listening sockets."""
        child = await self.children.get()
        await self.processes._ready[0].wait()
        sockets = list(self.processes._sockets[0])
        self.now += seconds
        child.ended.set_result(-9)
        while self.children.empty():
            await asyncio.sleep(0)
        return all(each.fileno() != -1 for each in sockets)


@asynccontextmanager
async def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Frontends]:
    frontends = Frontends(folder, monkeypatch)
    await frontends.processes.start()
    yield frontends
    await frontends.processes.stop(asyncio.Event(), lambda: None)


async def test_one_that_crashes_now_and_then_never_closes_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as frontends:
        monkeypatch.setattr(frontend_processes, "HOLD_MAX", 0.004)
        assert all([await frontends.crash_after(66.0) for _ in range(12)])


async def test_one_that_crashes_at_once_again_and_again_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, monkeypatch) as frontends:
        monkeypatch.setattr(frontend_processes, "HOLD_MAX", 0.004)
        kept = [await frontends.crash_after(0.0) for _ in range(5)]
        assert kept == [True, True, True, False, False], "waits of 1, 2, 4, 8 and 16 ms"
        assert await frontends.crash_after(31.0), "a start that held is like the first"
