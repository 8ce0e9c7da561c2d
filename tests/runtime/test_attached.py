"""Is a server that somebody else runs described with what the operator says of it, and followed by its health?"""

import asyncio
from typing import Any

import pytest

from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import EngineError
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.runtime.supervision import attached_servers
from penstock.runtime.supervision.attached_servers import AttachedServer

URL = "http://gpu1:8000"


class Register:
    """Stands for the fleet: a server that is there or not, and what was done about it."""

    def __init__(self) -> None:
        self.there = True
        self.known: list[dict[str, Any]] = []
        self.done: asyncio.Queue[str] = asyncio.Queue()
        self.silences: list[str] = []

    async def answers(self, url: str) -> bool:
        return self.there

    async def describe(self, worker: WorkerId, model: str, url: str, known: dict[str, Any]) -> WorkerCard:
        if not self.there:
            raise EngineError(f"{url} is away")
        self.known.append(known)
        return WorkerCard(id=worker, epoch=len(self.known), model=model, url=url)

    async def announce(self, card: WorkerCard, *, draining: bool = False) -> None:
        self.done.put_nowait(f"announced {card.epoch}" + (" draining" if draining else ""))

    async def drain(self, card: WorkerCard) -> None:
        self.done.put_nowait(f"drained {card.epoch}")

    async def withdraw(self, worker: WorkerId) -> None:
        self.done.put_nowait("withdrawn")

    def silent(self, worker: WorkerId) -> None:
        self.silences.append(worker)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_servers, "HEALTH_EVERY", 0.001)


async def test_it_goes_and_comes_back_newer(quick: None) -> None:
    register = Register()
    pool = PoolSettings(engine="vllm", urls=(URL,), events=("tcp://gpu1:5557",), topic="kv", block_size=32)
    server = AttachedServer(register, WorkerId("w"), "m", URL, pool)
    task = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(10):
            await server.ready
            assert await register.done.get() == "announced 1"
            register.there = False
            assert await register.done.get() == "withdrawn"
            register.there = True
            assert await register.done.get() == "announced 2"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert register.silences == ["w"]
    said = register.known[-1]
    assert (said["engine"], said["events"], said["topic"]) == ("vllm", ("tcp://gpu1:5557",), "kv")
    assert said["block_size"] == 32


async def test_one_that_is_not_there_at_the_start_is_told_once_and_may_still_come(quick: None) -> None:
    register = Register()
    register.there = False
    server = AttachedServer(register, WorkerId("w"), "m", URL, PoolSettings(urls=(URL,)))
    task = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="is away"):
                await server.ready
            register.there = True
            assert await register.done.get() == "announced 1"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_that_is_drained_gets_nothing_even_when_it_comes_back_until_that_is_undone(quick: None) -> None:
    register = Register()
    server = AttachedServer(register, WorkerId("w"), "m", URL, PoolSettings(urls=(URL,)))
    task = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(10):
            await server.ready
            assert await register.done.get() == "announced 1"
            await server.park()
            await server.park()
            assert await register.done.get() == "drained 1"
            register.there = False
            assert await register.done.get() == "withdrawn"
            register.there = True
            assert await register.done.get() == "announced 2 draining"
            await server.unpark()
            assert await register.done.get() == "announced 3"
            await server.unpark()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert register.done.empty()
