"""Does what an engine publishes reach us whole, in order, and again when we ask?"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from penstock.adapters.engines.kv_events.kv_event_codec import encode_batch
from penstock.adapters.engines.kv_events.kv_publisher import END, KvPublisher
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.seams import KvBatch
from penstock.adapters.zmq_receive import shared_context
from penstock.kernel.values import KvCleared, KvRemoved
from tests.kv_batches import batches_of

PATIENCE = 30.0


class Feed:
    """A publisher with its replay task, and a subscriber that already hears it."""

    def __init__(self, **options: object) -> None:
        self.publisher = KvPublisher(topic="kv", rank=2, **options)  # type: ignore[arg-type]
        self.subscriber = KvSubscriber(self.publisher.endpoint, self.publisher.replay_endpoint, "kv", rank=2)
        self.batches = batches_of(self.subscriber)
        self.replayer = asyncio.create_task(self.publisher.serve_replay())

    async def next(self) -> KvBatch:
        return await asyncio.wait_for(anext(self.batches), PATIENCE)

    async def warm(self) -> KvBatch:
        return await first_heard(self.batches, lambda: self.publisher.publish(1.0, [KvCleared()]))

    async def until(self, sequence: int) -> list[KvBatch]:
        out = [await self.next()]
        while out[-1].sequence < sequence:
            out.append(await self.next())
        return out

    async def close(self) -> None:
        self.replayer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.replayer
        self.subscriber.close()
        self.publisher.close()


async def first_heard(batches: AsyncIterator[KvBatch], publish) -> KvBatch:
    """Publish until the subscription hears: it is connected in the background."""
    waiting = asyncio.ensure_future(anext(batches))
    async with asyncio.timeout(PATIENCE):
        while not waiting.done():
            publish()
            await asyncio.wait({waiting}, timeout=0.02)
    return waiting.result()


@pytest.fixture
async def feed():
    feed = Feed(buffer_steps=100)
    yield feed
    await feed.close()


async def test_batches_arrive_in_order_with_the_publishers_numbers(feed):
    first = await feed.warm()
    numbers = [feed.publisher.publish(2.0, [KvRemoved(hashes=[i])]) for i in range(500)]
    got = await feed.until(numbers[-1])
    assert [b.sequence for b in got] == list(range(first.sequence + 1, numbers[-1] + 1))
    assert [b.events for b in got if b.sequence >= numbers[0]] == [[KvRemoved(hashes=[i])] for i in range(500)]
    assert {b.rank for b in got} == {2}
    assert feed.subscriber.received == len(got) + 1
    assert feed.subscriber.malformed == 0


async def test_a_replay_gives_all_from_the_asked_one_on(feed):
    for i in range(20):
        feed.publisher.publish(1.0, [KvRemoved(hashes=[i])])
    batches = await feed.subscriber.replay(15, PATIENCE)
    assert batches == [KvBatch(i, 2, [KvRemoved(hashes=[i])]) for i in range(15, 20)]
    assert await feed.subscriber.replay(20, PATIENCE) == []
    assert feed.publisher.replays == 2


async def test_a_replay_of_what_is_no_longer_kept_begins_later(feed):
    for _ in range(150):
        feed.publisher.publish(1.0, [KvCleared()])
    batches = await feed.subscriber.replay(0, PATIENCE)
    assert batches is not None
    assert [b.sequence for b in batches] == list(range(50, 150))


async def test_several_replays_at_once_do_not_mix(feed):
    for _ in range(90):
        feed.publisher.publish(1.0, [KvCleared()])
    answers = await asyncio.gather(*(feed.subscriber.replay(first, PATIENCE) for first in (0, 30, 60)))
    assert [len(answer or ()) for answer in answers] == [90, 60, 30]


async def test_no_replay_socket_and_a_deaf_one_both_answer_none():
    assert await KvSubscriber("tcp://127.0.0.1:1").replay(0) is None
    deaf = shared_context().socket(zmq.ROUTER)
    deaf.linger = 0
    port = deaf.bind_to_random_port("tcp://127.0.0.1")
    try:
        assert await KvSubscriber("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}").replay(0, timeout=0.1) is None
    finally:
        deaf.close(0)


async def test_bad_replay_requests_are_counted_and_the_next_is_answered(feed):
    feed.publisher.publish(1.0, [KvCleared()])
    client = zmq.asyncio.Context(shared_context()).socket(zmq.DEALER)
    client.linger = 0
    client.connect(feed.publisher.replay_endpoint)
    try:
        for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"more"], [b"", bytes(8)]):
            await client.send_multipart(frames)
        async with asyncio.timeout(PATIENCE):
            assert await client.recv_multipart() == [b"", b"kv", bytes(8), encode_batch(1.0, [KvCleared()], 2)]
            assert await client.recv_multipart() == [b"", b"", END, b""]
        assert feed.publisher.rejected == 4
    finally:
        client.close(0)


class Raw:
    """An engine that sends what the test says, frame by frame, in the layout of its version."""

    def __init__(self) -> None:
        context = shared_context()
        self.pub = context.socket(zmq.PUB)
        self.router = zmq.asyncio.Context(context).socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def send(self, *frames: bytes) -> None:
        self.pub.send_multipart(frames)

    def close(self) -> None:
        self.pub.close(0)
        self.router.close(0)


@pytest.fixture
def raw():
    raw = Raw()
    yield raw
    raw.close()


GOOD = encode_batch(1.0, [KvCleared()])


async def test_bad_frames_are_counted_and_what_follows_is_heard(raw):
    subscriber = KvSubscriber(raw.endpoint, topic="kv")
    batches = batches_of(subscriber)
    await first_heard(batches, lambda: raw.send(b"kv", (1).to_bytes(8, "big"), GOOD))
    raw.send(b"kv")
    raw.send(b"kv", b"short", GOOD)
    raw.send(b"kv", bytes(8), GOOD, b"extra")
    raw.send(b"kv", bytes(8), b"\xc1")
    raw.send(b"kv", bytes(8), GOOD[:-1])
    raw.send(b"kvetch", bytes(8), GOOD)
    raw.send(b"kv", (99).to_bytes(8, "big"), GOOD)
    batch = await asyncio.wait_for(anext(batches), PATIENCE)
    while batch.sequence == 1:
        batch = await asyncio.wait_for(anext(batches), PATIENCE)
    assert batch == KvBatch(99, 0, [KvCleared()])
    assert (subscriber.malformed, subscriber.foreign) == (5, 1)
    subscriber.close()


@pytest.mark.parametrize("topic", [[], [b"kv"]], ids=["older, without topic", "newer, with topic"])
async def test_the_replay_layouts_of_older_and_newer_engines(raw, topic):
    subscriber = KvSubscriber(raw.endpoint, raw.replay_endpoint, topic="kv")

    async def answer() -> None:
        client, empty, first = await raw.router.recv_multipart()
        assert (empty, first) == (b"", (4).to_bytes(8, "big"))
        for number in (4, 5):
            await raw.router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), GOOD])
        await raw.router.send_multipart([client, b"", *topic, (6).to_bytes(8, "big"), b"\xc1"])
        await raw.router.send_multipart([client, b"", *([b""] if topic else []), END, b""])

    batches, _ = await asyncio.gather(subscriber.replay(4, PATIENCE), answer())
    assert batches == [KvBatch(4, 0, [KvCleared()]), KvBatch(5, 0, [KvCleared()])]
    assert subscriber.malformed == 1


async def test_an_engine_that_restarts_on_its_port_is_heard_again(raw):
    subscriber = KvSubscriber(raw.endpoint, topic="kv")
    batches = batches_of(subscriber)
    await first_heard(batches, lambda: raw.send(b"kv", (7).to_bytes(8, "big"), GOOD))
    raw.pub.close(0)
    again = shared_context().socket(zmq.PUB)
    again.linger = 0
    async with asyncio.timeout(PATIENCE):
        while True:  # the port is free only when the old socket's thread has closed it
            try:
                again.bind(raw.endpoint)
                break
            except zmq.ZMQError:
                await asyncio.sleep(0.02)
        raw.pub = again
        batch = await first_heard(batches, lambda: raw.send(b"kv", (0).to_bytes(8, "big"), GOOD))
        while batch.sequence == 7:
            batch = await anext(batches)
    assert batch.sequence == 0
    subscriber.close()


async def test_a_flood_leaves_the_loop_to_others(feed):
    await feed.warm()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    last = 0
    for _ in range(2000):
        last = feed.publisher.publish(1.0, [KvCleared()])
    await feed.until(last)
    task.cancel()
    assert turns >= 20


class Door:
    """A port whose connections go to one server now and to another one later; to switch cuts those that are open."""

    def __init__(self) -> None:
        self.target = ""
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, target: str) -> str:
        self.target = target
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def switch(self, target: str) -> None:
        self.target = target
        for writer in self._open:
            writer.close()

    async def close(self) -> None:
        self._server.close()
        self.switch("")

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", int(self.target.rpartition(":")[2]))
        self._open |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def two_lives(**options: object) -> AsyncIterator[tuple[Feed, Feed, Door, Door, list[str]]]:
    """A publisher that is heard through a door, the one that comes after it, and what the subscriber says is lost."""
    before, after = Feed(**options), Feed(**options)
    events, replay = Door(), Door()
    lost: list[str] = []
    before.subscriber = KvSubscriber(
        await events.start(before.publisher.endpoint),
        await replay.start(before.publisher.replay_endpoint),
        "kv",
        rank=2,
        lost=lost.append,
    )
    before.batches = batches_of(before.subscriber)
    try:
        yield before, after, events, replay, lost
    finally:
        await before.close()
        await after.close()
        await events.close()
        await replay.close()


@pytest.mark.parametrize("ahead", [-2, 0, 5], ids=["fewer batches", "just as many", "more batches"])
async def test_another_process_behind_the_address_is_noticed_whatever_its_numbers(ahead):
    async with two_lives() as (before, after, events, replay, lost):
        last = (await before.warm()).sequence
        while last < 4:
            last = before.publisher.publish(1.0, [KvRemoved(hashes=[last])])
        await before.until(last)
        for number in range(last + 1 + ahead):
            after.publisher.publish(2.0, [KvRemoved(hashes=[100 + number])])
        replay.switch(after.publisher.replay_endpoint)
        events.switch(after.publisher.endpoint)
        hearing = asyncio.ensure_future(anext(before.batches))
        async with asyncio.timeout(PATIENCE):
            while not lost:
                await asyncio.sleep(0.01)
        [reason] = lost
        assert "another process" in reason
        async with asyncio.timeout(PATIENCE):
            heard = await hearing
            while heard.sequence != last + ahead or heard.events != [KvRemoved(hashes=[100 + last + ahead])]:
                heard = await before.next()  # its last batch, whose number shows what else there was


async def test_a_cut_connection_to_the_same_process_loses_nothing():
    async with two_lives() as (before, _, events, _, lost):
        await before.warm()
        asked = before.publisher.replays
        events.switch(events.target)
        async with asyncio.timeout(PATIENCE):
            while before.publisher.replays == asked or before.subscriber.checks:
                await asyncio.sleep(0.01)
        assert not lost
        await first_heard(before.batches, lambda: before.publisher.publish(1.0, []))


async def test_what_was_sent_while_the_connection_was_cut_comes_although_nothing_else_is_sent():
    async with two_lives() as (before, _, events, _, lost):
        await before.warm()
        for _ in range(100):  # more than the subscriber remembers
            last = before.publisher.publish(1.0, [])
        await before.until(last)
        events.switch("")
        async with asyncio.timeout(PATIENCE):
            while before.subscriber._doubted is None:
                await asyncio.sleep(0.01)
        for _ in range(5):
            last = before.publisher.publish(1.0, [])
        events.target = before.publisher.endpoint
        assert (await before.next()).sequence == last, "the last one, whose number shows the gap"
        assert not lost


async def test_a_process_that_comes_after_what_is_covered_is_heard_from_its_first_batch():
    async with two_lives() as (before, after, events, replay, lost):
        before.subscriber.cover(1_000)
        subscribed = asyncio.ensure_future(before.next())
        for _ in range(3):
            before.publisher.publish(1.0, [])
        assert await before.subscriber.past(0, lambda batch: None, PATIENCE)
        before.subscriber.cover(1_000)
        await asyncio.sleep(0)
        after.publisher.publish(2.0, [])
        async with asyncio.timeout(PATIENCE):
            while not before.subscriber._live.arrived.is_set():  # it is connected
                before.publisher.publish(1.0, [])
                await asyncio.sleep(0.02)
        replay.switch(after.publisher.replay_endpoint)
        events.switch(after.publisher.endpoint)
        async with asyncio.timeout(PATIENCE):
            while not lost:
                await asyncio.sleep(0.01)
            while not subscribed.done():
                after.publisher.publish(2.0, [])
                await asyncio.sleep(0.02)
        assert subscribed.result().sequence < 1_000


async def test_a_process_that_no_longer_has_what_it_sent_or_can_not_be_asked_is_not_trusted():
    async with two_lives(buffer_steps=2) as (before, _, events, _, lost):
        await before.warm()
        for _ in range(70):  # more than the subscriber remembers, so that not even its oldest is there any more
            last = before.publisher.publish(1.0, [])
        await before.until(last)
        events.switch(events.target)
        async with asyncio.timeout(PATIENCE):
            while not lost:
                await asyncio.sleep(0.01)
        assert (await before.next()).sequence == last
