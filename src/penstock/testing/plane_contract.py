"""Contract suite of an `EventPlane`: what its users rely on, whichever adapter it is.

A test module imports all names and has a fixture ``planes``, a `PlaneHarness` over the plane under test:

    from penstock.testing.plane_contract import *
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from penstock.adapters.seams import EventPlane, PlaneMessage

PATIENCE = 30.0
LAST = b"last"


class PlaneHarness(Protocol):
    """Planes that all hear each other, named p0, p1, ..."""

    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]:
        """Return so many planes; ``limit``: messages that a slow subscriber may be behind."""
        ...

    async def close(self) -> None:
        """End all planes."""
        ...


async def heard(messages: AsyncIterator[PlaneMessage], *senders: tuple[EventPlane, str]) -> None:
    """Publish until a subscription hears every sender: connections are made in the background."""
    missing = {plane.name for plane, _ in senders}  # type: ignore[attr-defined]
    next_one = asyncio.ensure_future(anext(messages))
    async with asyncio.timeout(PATIENCE):
        while missing:
            for plane, topic in senders:
                await plane.publish(topic, b"hello")
            await asyncio.wait({next_one}, timeout=0.02)
            while next_one.done() and missing:
                missing.discard(next_one.result().publisher)
                if missing:
                    next_one = asyncio.ensure_future(anext(messages))
                    await asyncio.sleep(0)
    if not next_one.done():
        next_one.cancel()


async def until_last(messages: AsyncIterator[PlaneMessage], senders: int = 1) -> list[PlaneMessage]:
    out: list[PlaneMessage] = []
    async with asyncio.timeout(PATIENCE):
        while senders:
            message = await anext(messages)
            out.append(message)
            senders -= message.payload == LAST
    return out


async def test_messages_of_others_arrive_in_order_and_numbered(planes: PlaneHarness) -> None:
    a, b = await planes.mesh(2)
    messages = b.subscribe("t")
    await heard(messages, (a, "t"))
    for i in range(1000):
        await a.publish("t", str(i).encode())
    await a.publish("t", LAST)
    got = await until_last(messages)
    numbers = [m.sequence for m in got]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [m.payload for m in got if m.payload != b"hello"] == [*(str(i).encode() for i in range(1000)), LAST]
    assert {(m.publisher, m.topic) for m in got} == {("p0", "t")}


async def test_nobody_hears_itself(planes: PlaneHarness) -> None:
    a, b = await planes.mesh(2)
    mine, theirs = a.subscribe("t"), b.subscribe("t")
    await heard(theirs, (a, "t"))
    await heard(mine, (b, "t"))
    await a.publish("t", LAST)
    await until_last(theirs)
    await b.publish("t", LAST)
    assert {m.publisher for m in await until_last(mine)} == {"p1"}


async def test_topics_do_not_mix_even_where_one_begins_like_the_other(planes: PlaneHarness) -> None:
    a, b = await planes.mesh(2)
    short, long = b.subscribe("kv"), b.subscribe("kv/0")
    await heard(short, (a, "kv"))
    await heard(long, (a, "kv/0"))
    await a.publish("kv/0", b"for the long one")
    await a.publish("kv", LAST)
    await a.publish("kv/0", LAST)
    assert all(m.topic == "kv" and m.payload in (b"hello", LAST) for m in await until_last(short))
    got = [m for m in await until_last(long) if m.payload != b"hello"]
    assert [m.payload for m in got] == [b"for the long one", LAST]
    assert got[1].sequence == got[0].sequence + 1  # counted per topic: the other one leaves no gap


async def test_several_publishers_are_distinguished(planes: PlaneHarness) -> None:
    a, b, c = await planes.mesh(3)
    messages = c.subscribe("t")
    await heard(messages, (a, "t"), (b, "t"))
    for plane in (a, b):
        for i in range(50):
            await plane.publish("t", str(i).encode())
        await plane.publish("t", LAST)
    got = await until_last(messages, senders=2)
    for name in ("p0", "p1"):
        numbers = [m.sequence for m in got if m.publisher == name]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_two_subscriptions_of_one_plane_both_hear_all(planes: PlaneHarness) -> None:
    a, b = await planes.mesh(2)
    first, second = b.subscribe("t"), b.subscribe("t")
    await heard(first, (a, "t"))
    await heard(second, (a, "t"))
    await a.publish("t", LAST)
    assert (await until_last(first))[-1] == (await until_last(second))[-1]


async def test_what_a_slow_subscriber_lost_shows_as_a_gap(planes: PlaneHarness) -> None:
    a, b = await planes.mesh(2, limit=5)
    messages = b.subscribe("t")
    await heard(messages, (a, "t"))
    for i in range(4000):
        await a.publish("t", b"x" * 8192)
        if i % 100 == 0:
            await asyncio.sleep(0)
    got: list[PlaneMessage] = []
    async with asyncio.timeout(PATIENCE):
        while not got or got[-1].payload != LAST:
            await a.publish("t", LAST)
            got.append(await anext(messages))
    numbers = [m.sequence for m in got]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] - numbers[0] + 1 > len(numbers)


async def test_closing_ends_the_subscriptions_that_wait(planes: PlaneHarness) -> None:
    a, b = await planes.mesh(2)
    messages = b.subscribe("t")
    await heard(messages, (a, "t"))
    waiting = asyncio.ensure_future(_drain_messages(messages))
    await asyncio.sleep(0)
    await b.close()
    await asyncio.wait_for(waiting, PATIENCE)
    await a.publish("t", b"to nobody")


async def _drain_messages(messages: AsyncIterator[PlaneMessage]) -> None:
    async for _ in messages:
        pass
