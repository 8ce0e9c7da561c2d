"""Do routers of several processes hear each other's placements, many in one message, and only what still matters?"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.kernel.machine import Nanos, Woken, nanos
from penstock.kernel.values import Prompt, RequestId, Target, WorkerCard, WorkerId
from penstock.router.events import OperatorNote, PeerUpdate, Placement, Publish, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.router.workers.worker_events import STALE_AFTER
from penstock.runtime.cluster_state.placement_sync import FrontendCard, PlacementSync
from penstock.runtime.live_driver import LiveDriver


class Side:
    """One frontend's router and its line to the others."""

    def __init__(self, name: str, space: MemorySpace) -> None:
        self.router = Router(RouterSettings(), name=name, shared=True)
        self.live = LiveDriver({"router": self.router})
        self.live.on(OperatorNote, lambda now, sender, effect: None)
        self.plane = ZmqPlane(name)
        card = FrontendCard(id=name, url="", admin_url="", pid=1, plane=self.plane.endpoint, run="")
        self.peers = PlacementSync(MemoryStore(space), self.live, self.plane, card, 30.0)
        self.sent: list[bytes] = []
        send = self.plane.send

        def counted(topic: str, payload: bytes) -> None:
            self.sent.append(payload)
            send(topic, payload)

        self.plane.send = counted  # type: ignore[method-assign]
        self.live.post(
            "router", WorkerJoined(card=WorkerCard(id=WorkerId("w"), url="u", model="m", block_size=4, epoch=1))
        )

    def says(self, step: Any, number: int, **more: Any) -> None:
        placement = Placement(step=step, id=RequestId(f"r{number}"), model="m", target=Target(WorkerId("w")), **more)
        self.peers._publish(0, "router", Publish(placement=placement))


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Side, Side]]:
    space = MemorySpace()
    sides = Side("one", space), Side("two", space)
    for side in sides:
        await side.peers.announce()
    running = [asyncio.create_task(side.peers.run()) for side in sides]
    try:
        async with asyncio.timeout(20):
            while not all(side.peers.cards for side in sides):
                await asyncio.sleep(0.01)
            while not len(sides[1].router.pools["m"].active):  # a subscription takes a moment to arrive
                sides[0].says("placed", -1, prompt=Prompt(1))
                await asyncio.sleep(0.01)
            sides[0].says("ended", -1)
            while len(sides[1].router.pools["m"].active):
                await asyncio.sleep(0.01)
        sides[0].sent.clear()
        yield sides
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for side in sides:
            await side.plane.close()
            side.live.close()


async def test_placements_of_a_moment_travel_together_and_count_as_load() -> None:
    async with two() as (mine, other):
        for number in range(50):
            mine.says("placed", number, prompt=Prompt(8, [number, number + 1000]))
        async with asyncio.timeout(10):
            while len(other.router.pools["m"].active) < 50:
                await asyncio.sleep(0.005)
        assert len(mine.sent) < 10
        load = other.router.pools["m"].active.load(Target(WorkerId("w")))
        assert (load.requests, load.prefill_tokens) == (50, 400)
        for number in range(50):
            mine.says("ended", number)
        async with asyncio.timeout(10):
            while len(other.router.pools["m"].active):
                await asyncio.sleep(0.005)


async def test_steps_that_no_longer_matter_are_left_out() -> None:
    async with two() as (mine, _):
        mine.says("placed", 1, prompt=Prompt(8, [1, 2]))
        mine.says("first", 1)
        mine.says("grown", 1, tokens=4)
        mine.says("grown", 1, tokens=8)
        mine.says("placed", 2, prompt=Prompt(8))
        mine.says("first", 2)
        mine.says("grown", 2, tokens=4)
        mine.says("ended", 2)
        async with asyncio.timeout(10):
            while not mine.sent:
                await asyncio.sleep(0.005)
        (message,) = mine.sent
        found = [(p["id"], p["step"], p.get("tokens", 0)) for p in msgspec.msgpack.decode(message)["placements"]]
        assert found == [
            ("r1", "placed", 0), ("r1", "first", 0), ("r1", "grown", 8), ("r2", "placed", 0), ("r2", "ended", 0)
        ]  # fmt: skip


def test_only_what_is_known_of_a_request_is_told() -> None:
    blocks = [1 << 63] * 62
    common = {"id": RequestId("0123456789abcdef"), "model": "m", "target": Target(WorkerId("main-12"))}
    told = [
        Placement(step="placed", prompt=Prompt(1000, blocks), cached=64, **common),
        Placement(step="first", **common),
        Placement(step="ended", tokens=100, **common),
    ]
    sizes = [len(msgspec.msgpack.encode(each)) for each in told]
    assert sizes[0] < 9 * len(blocks) + 120 and max(sizes[1:]) < 80
    for each in told:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=Placement) == each


def test_one_look_for_silent_requests_is_planned_however_many_there_are() -> None:
    router = Router(RouterSettings(), shared=True)
    card = WorkerCard(id=WorkerId("w"), url="u", model="m", block_size=4, epoch=1)
    router.handle(0, WorkerJoined(card=card))

    def heard(now: Nanos, number: int) -> None:
        placement = Placement(
            step="placed", id=RequestId(f"r{number}"), model="m", target=Target(WorkerId("w")), prompt=Prompt(8, [])
        )
        router.handle(now, PeerUpdate(router="other", placement=placement))

    for number in range(2000):
        heard(nanos(number / 1000), number)
    assert len([timer for timer in router.timers if timer[1] == "sweep"]) == 1
    while router.armed is not None:
        now = router.armed
        assert now <= nanos(STALE_AFTER + 2.1)
        left = len(router.pools["m"].active)
        router.handle(now, Woken())
        assert len(router.pools["m"].active) < left or now <= nanos(STALE_AFTER)
    assert len(router.pools["m"].active) == 0
