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
from penstock.kernel.errors import EngineError
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision import child_process, frontend_processes
from penstock.runtime.supervision.frontend_processes import FrontendProcesses

WAITS = SuperviseSettings(restart_backoff=0.001)
SETTINGS = ClusterSettings(frontend=FrontendSettings(port=0, processes=1), supervise=WAITS)


class Child:
    """A process that is ready at once, unless it is broken, and ends when it is told to."""

    pid = 1

    def __init__(self, broken: bool) -> None:
        self.broken = broken
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.process: Any = SimpleNamespace(returncode=None, send_signal=lambda signal: self.ended.set_result(0))
        self.working = asyncio.Event()

    async def ready(self, timeout: float) -> dict[str, Any]:
        if self.broken:
            raise EngineError("frontend-0 said nothing at its start")
        return json.loads("{}")

    async def wait(self) -> int:
        self.working.set()
        return await asyncio.shield(self.ended)

    async def stop(self, grace: float) -> bool:
        return True


class Frontends:
    """Frontend processes whose children and clock are the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.children: asyncio.Queue[Child] = asyncio.Queue()
        monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(frontend_processes.ChildProcess, "start", self._start)
        book = CrashBook(MemoryStore(MemorySpace()), 10.0)
        self.gave_up: list[str] = []
        self.broken = False
        """Whether the next children say nothing when they start."""
        self.processes = FrontendProcesses(msgspec.structs.replace(SETTINGS), folder, self.gave_up.append, book)

    async def _start(self, *arguments: Any, **more: Any) -> Child:
        child = Child(self.broken)
        self.children.put_nowait(child)
        return child

    async def crash_after(self, seconds: float) -> bool:
        """Let the child work for so long and crash; return whether its successor gets the same listening sockets."""
        child = await self.children.get()
        await child.working.wait()
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


async def test_the_first_start_ends_the_cluster_where_it_fails_and_a_later_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as frontends:
        await frontends.crash_after(1.0)
        frontends.broken = True
        await frontends.crash_after(1.0)
        for _ in range(2):
            await frontends.children.get()
        frontends.broken = False
        while (child := await frontends.children.get()).broken:
            pass
        await child.working.wait()
        assert not frontends.gave_up
        await frontends.processes.park(0)
        frontends.broken = True
        await frontends.processes.unpark(0)
        await frontends.children.get()
        while not frontends.gave_up:
            await asyncio.sleep(0)
        assert frontends.gave_up[0] == "frontend-0 said nothing at its start"
