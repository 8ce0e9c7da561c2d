"""Does the router learn what an engine cached before we came, even where it could not be asked at first?"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from penstock.adapters.engines.kv_events import kv_subscriber
from penstock.adapters.engines.kv_events.kv_event_codec import encode_batch
from penstock.adapters.engines.kv_events.kv_publisher import END, KvPublisher
from penstock.adapters.listen_address import free_port
from penstock.adapters.zmq_receive import shared_context
from penstock.kernel.values import KvRemoved, Target, WorkerCard, WorkerId
from penstock.router.events import KvObserved, KvSourceJoining, KvSourceLost
from penstock.runtime.kv_events import kv_event_feeds as module
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds

PATIENCE = 30.0


class Router:
    """What `KvEventFeeds` needs of the live run: it keeps what was posted."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.joining: list[bool] = []
        self.lost: list[str] = []
        self.changed = asyncio.Event()

    def on(self, effect: type, carrier: Any) -> None:
        pass

    def post(self, machine: str, event: Any) -> None:
        if isinstance(event, KvObserved):
            self.heard.append(event.sequence)
        elif isinstance(event, KvSourceJoining):
            self.joining.append(event.on)
        else:
            assert isinstance(event, KvSourceLost), event
            self.lost.append(event.reason)
        self.changed.set()

    async def until(self, count: int, joining: int = 0) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.heard) < count or len(self.joining) < joining:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def publisher() -> AsyncIterator[KvPublisher]:
    made = KvPublisher()
    for number in range(3):
        made.publish(1.0, [KvRemoved(hashes=[number])])
    yield made
    made.close()


def card(publisher: KvPublisher) -> WorkerCard:
    return WorkerCard(
        id=WorkerId("w"),
        epoch=1,
        model="m",
        url="u",
        events=(publisher.endpoint,),
        replay=(publisher.replay_endpoint,),
    )


async def test_an_idle_engine_that_could_not_be_asked_is_asked_again(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_TIMEOUT", 0.1)
    monkeypatch.setattr(module, "REPLAY_PAUSE", 0.05)
    router = Router()
    feeds = KvEventFeeds(router)  # type: ignore[arg-type]
    feeds.start(card(publisher))
    await asyncio.wait_for(publisher._router.recv_multipart(), PATIENCE)  # taken, and never answered
    await asyncio.sleep(0.12)
    assert router.heard == []
    replayer = asyncio.create_task(publisher.serve_replay())
    try:
        await router.until(3, joining=2)
        assert router.heard == [0, 1, 2] and router.joining == [True, False]
    finally:
        await feeds.close()
        replayer.cancel()
        await asyncio.gather(replayer, return_exceptions=True)


async def test_the_next_event_ends_the_asking_since_its_number_tells_the_router_what_is_missing(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_TIMEOUT", 0.1)
    monkeypatch.setattr(module, "REPLAY_PAUSE", 3600.0)
    router = Router()
    feeds = KvEventFeeds(router)  # type: ignore[arg-type]
    feeds.start(card(publisher))
    try:
        await asyncio.wait_for(publisher._router.recv_multipart(), PATIENCE)
        while not router.heard:
            publisher.publish(2.0, [KvRemoved(hashes=[9])])
            await asyncio.sleep(0.02)
        assert router.heard[0] >= 3
    finally:
        await feeds.close()


@pytest.mark.parametrize(
    ("live", "heard"),
    [
        ([(0, 5), (1, 6), (2, 7)], [0, 1, 2]),  # the first two came both ways
        ([(0, 8), (1, 6)], [0, 1, 0, 1]),  # another batch of a number that was there: a publisher began anew
    ],
)
async def test_what_comes_both_as_past_and_by_itself_is_posted_once(
    live: list[tuple[int, int]], heard: list[int]
) -> None:
    """An engine that answers what it sent before only after it has sent more, which waits meanwhile."""
    context: zmq.Context[zmq.Socket[bytes]] = shared_context()
    with context.socket(zmq.XPUB) as pub, zmq.asyncio.Context(context).socket(zmq.ROUTER) as asked:
        pub.linger = asked.linger = 0
        events, replay = (f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in (pub, asked))
        router = Router()
        feeds = KvEventFeeds(router)  # type: ignore[arg-type]
        feeds.start(WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="u", events=(events,), replay=(replay,)))
        try:
            async with asyncio.timeout(PATIENCE):
                client, empty, _ = await asked.recv_multipart()
            await asyncio.to_thread(pub.recv)  # it is subscribed
            for number, block in live:
                pub.send_multipart((b"", number.to_bytes(8, "big"), batch(block)))
            source, _ = feeds._subscribers[Target(WorkerId("w"), 0)]
            async with asyncio.timeout(PATIENCE):
                await source.arrived()
            assert router.heard == []
            for number, block in ((0, 5), (1, 6)):
                await asked.send_multipart((client, empty, b"", number.to_bytes(8, "big"), batch(block)))
            await asked.send_multipart((client, empty, b"", END, b""))
            await router.until(len(heard))
            assert router.heard == heard
        finally:
            await feeds.close()


async def test_the_past_is_asked_for_once_what_comes_after_it_can_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "CONNECT_WAIT", PATIENCE)
    context: zmq.Context[zmq.Socket[bytes]] = shared_context()
    with context.socket(zmq.PUB) as pub, zmq.asyncio.Context(context).socket(zmq.ROUTER) as asked:
        pub.linger = asked.linger = 0
        events = f"tcp://127.0.0.1:{free_port()}"
        replay = f"tcp://127.0.0.1:{asked.bind_to_random_port('tcp://127.0.0.1')}"
        feeds = KvEventFeeds(Router())  # type: ignore[arg-type]
        feeds.start(WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="u", events=(events,), replay=(replay,)))
        try:
            question = asyncio.ensure_future(asked.recv_multipart())
            await asyncio.wait({question}, timeout=0.1)
            assert not question.done()
            pub.bind(events)
            await asyncio.wait_for(question, PATIENCE)
        finally:
            await feeds.close()


async def test_an_engine_whose_address_is_taken_is_lost_and_not_joining_for_ever() -> None:
    with shared_context().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        router = Router()
        feeds = KvEventFeeds(router)  # type: ignore[arg-type]
        endpoint = f"@tcp://127.0.0.1:{port}"
        feeds.start(WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="u", events=(endpoint,)))
        await router.until(0, joining=2)
        assert router.joining == [True, False]
        assert [reason for reason in router.lost if "can't be bound" in reason]
        await feeds.close()


def batch(block: int) -> bytes:
    return encode_batch(1.0, [KvRemoved(hashes=[block])])
