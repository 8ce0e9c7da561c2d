"""Membership follows the store: joins, leaves, drains, outages; bad entries are counted, never fatal."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import penstock
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import OperatorNote
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.cluster_state.membership import Membership, MembershipEntry, key_of
from penstock.runtime.live_driver import LiveDriver
from penstock.testing import card

SOURCES = str(Path(penstock.__file__).parent)


class Scene:
    """A store, a router that follows it, and who was started and stopped."""

    def __init__(self) -> None:
        self.space = MemorySpace()
        self.store = MemoryStore(self.space)
        self.router = Router(RouterSettings())
        live = LiveDriver({"router": self.router})
        live.on(OperatorNote, lambda now, name, effect: None)
        self.told: list[str] = []
        self.membership = Membership(
            MemoryStore(self.space), live, started=lambda c: self.told.append(f"+{c.id}/{c.epoch}"), stopped=self._stop
        )
        self.task = asyncio.create_task(self.membership.run())

    async def _stop(self, gone: WorkerCard) -> None:
        self.told.append(f"-{gone.id}/{gone.epoch}")

    async def put(self, worker: WorkerCard, draining: bool = False, silent: bool = False) -> None:
        entry = MembershipEntry(card=worker, draining=draining, silent=silent)
        await self.store.put(key_of(worker.id), msgspec.json.encode(entry))

    def states(self) -> dict[str, str]:
        return {worker.card.id: worker.state for worker in self.router.roster}

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not met():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_workers_come_drain_restart_and_go() -> None:
    scene = Scene()
    await scene.put(card("a"))
    await scene.put(card("b"))
    await scene.until(lambda: scene.states() == {"a": "ready", "b": "ready"})
    await scene.put(card("b"), silent=True)
    await scene.until(lambda: scene.membership.silent == {"b"})
    await scene.put(card("b"))
    await scene.until(lambda: not scene.membership.silent)
    await scene.put(card("a"), draining=True)
    await scene.until(lambda: scene.states()["a"] == "draining")
    await scene.put(card("b", epoch=2))
    await scene.until(lambda: "+b/2" in scene.told)
    assert scene.told.index("-b/1") < scene.told.index("+b/2")
    await scene.store.delete(key_of(WorkerId("a")))
    await scene.until(lambda: scene.states() == {"b": "ready"})
    await scene.close()


async def test_an_outage_freezes_and_is_reconciled_afterwards() -> None:
    scene = Scene()
    await scene.put(card("a"))
    await scene.put(card("b"))
    await scene.until(lambda: len(scene.states()) == 2)
    scene.space.outage = "the disk is gone"
    scene.space.change()
    await scene.until(lambda: not scene.membership.available)
    assert len(scene.states()) == 2, "nobody is dropped"
    scene.space.outage = None
    await scene.store.delete(key_of(WorkerId("a")))
    await scene.until(lambda: scene.membership.available and set(scene.states()) == {"b"})
    await scene.close()


async def test_what_is_no_worker_is_counted_and_ignored() -> None:
    scene = Scene()
    await scene.store.put("workers/x", b"not json")
    await scene.store.put("workers/y", b'{"card": {"id": 3}}')
    await scene.put(card("a"))
    await scene.until(lambda: "a" in scene.states())
    assert scene.membership.malformed == 2
    await scene.close()


async def test_one_that_left_and_comes_back_as_what_it_was_is_taken_in_again() -> None:
    scene = Scene()
    for life in (1, 2, 3):
        await scene.put(card("a"))
        await scene.until(lambda: scene.states() == {"a": "ready"})
        assert scene.told[-1] == f"+a/{life}", "to the router it is a new one"
        await scene.put(card("a"), draining=True)
        await scene.until(lambda: scene.states() == {"a": "draining"})
        await scene.store.delete(key_of(WorkerId("a")))
        await scene.until(lambda: scene.states() == {})
    # A start of its own after that counts as one, also where its epoch is not above those that were made up here.
    await scene.put(card("a", epoch=2))
    await scene.until(lambda: scene.states() == {"a": "ready"})
    await scene.put(card("a", epoch=3))
    await scene.until(lambda: scene.told[-2:] == ["-a/4", "+a/5"])
    await scene.close()


async def lines_of_batches(count: int) -> tuple[int, int]:
    """Return how many lines of our code run while so many workers join in one batch, and while they leave in one."""
    scene = Scene()
    await scene.until(scene.membership.read.is_set)
    lines = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return local

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(SOURCES) else None

    async def counted(met: Callable[[], bool]) -> int:
        nonlocal lines
        lines = 0
        sys.settrace(traced)
        try:
            scene.space.change()
            while not met():
                await asyncio.sleep(0)
        finally:
            sys.settrace(None)
        return lines

    for number in range(count):
        worker = card(f"w{number}")
        scene.space.values[key_of(worker.id)] = msgspec.json.encode(MembershipEntry(card=worker))
    joined = await counted(lambda: len(scene.told) == count)
    scene.space.values.clear()
    left = await counted(lambda: len(scene.told) == 2 * count)
    assert not scene.states()
    await scene.close()
    return joined, left


async def test_a_batch_of_joins_and_of_leaves_costs_work_by_its_size() -> None:
    few, many = await lines_of_batches(50), await lines_of_batches(400)
    for small, large in zip(few, many, strict=True):
        assert large < 10 * small
