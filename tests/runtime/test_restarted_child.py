"""Is a child started again whenever it ends, after growing waits, and never left behind by a stop?"""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.kernel.errors import EngineError
from penstock.runtime.supervision.child_process import ChildProcess, RestartedChild

SUPERVISE = SuperviseSettings(restart_backoff=0.01, stop_grace=10.0)
READY = "import sys, time; print('{}', flush=True); "


class Children:
    """Starts children that run some Python; the next ones run what comes next, the last for ever."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self.programs = list(programs)
        self.folder = folder
        self.started: list[ChildProcess] = []
        self.crashes: list[str] = []
        self.hold: asyncio.Event | None = None
        self.child = RestartedChild(
            "the child", "nothing is done", lambda: SUPERVISE, self.start, patience=30.0, crashed=self.crashes.append
        )

    async def start(self) -> ChildProcess:
        if self.hold is not None:
            await self.hold.wait()
        program = self.programs.pop(0) if len(self.programs) > 1 else self.programs[0]
        process = await asyncio.create_subprocess_exec(
            "python3", "-c", program, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        self.started.append(ChildProcess("child", process, self.folder / "log"))
        return self.started[-1]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.started) < count:
                await asyncio.sleep(0.01)


async def test_one_that_ends_is_started_again_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    children = Children(tmp_path, READY + "sys.exit(3)", "print('no JSON')", READY + "time.sleep(3600)")
    children.child.begin()
    children.child.begin()  # once more changes nothing
    await children.until(3)
    async with asyncio.timeout(30):
        await children.child.stop()
    assert all(each.process.returncode is not None for each in children.started)
    (crash,) = children.crashes
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert first == f"the child {crash}; nothing is done meanwhile"
    assert second.startswith("the child can't be started, so nothing is done: child ")
    await asyncio.sleep(0.1)
    assert len(children.started) == 3, "after a stop none is started"


async def test_a_stop_while_one_is_being_started_ends_it(tmp_path: Path) -> None:
    children = Children(tmp_path, READY + "time.sleep(3600)")
    children.hold = asyncio.Event()
    children.child.begin()
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(children.child.stop())
    await asyncio.sleep(0.05)
    children.hold.set()
    async with asyncio.timeout(30):
        await stopping
    assert [each.process.returncode is not None for each in children.started] == [True]


async def test_one_that_can_not_start_says_why_once_and_again_where_that_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reason is of one process alone, however often it stands in the log."""
    caplog.set_level(logging.ERROR)
    reason = tmp_path / "reason"
    reason.write_text("raise SystemExit('the key is missing')")
    tries = 0

    async def start() -> ChildProcess:
        nonlocal tries
        tries += 1
        if tries == 4:
            reason.write_text("raise SystemExit('the key is too short')")
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return await ChildProcess.start("child", "failing", [], log_path=tmp_path / "log", env=env)

    (tmp_path / "failing.py").write_text(f"exec(open({str(reason)!r}).read())")
    child = RestartedChild("the child", "nothing is done", lambda: SUPERVISE, start, patience=30.0)
    child.begin()
    async with asyncio.timeout(30):
        while tries < 6:
            await asyncio.sleep(0.01)
        await child.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert [line.count("the key is") for line in lines] == [1, 1] and "too short" in lines[1]


async def test_one_whose_start_fails_is_tried_again(tmp_path: Path) -> None:
    tries = 0

    async def start() -> ChildProcess:
        nonlocal tries
        tries += 1
        raise EngineError("there is no room")

    child = RestartedChild("the child", "nothing is done", lambda: SUPERVISE, start)
    child.begin()
    async with asyncio.timeout(30):
        while tries < 3:
            await asyncio.sleep(0.01)
        await child.stop()
