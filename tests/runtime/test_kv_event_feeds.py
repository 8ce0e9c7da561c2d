"""Does the router learn what an engine cached before we came, even where it could not be asked at first?"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher
from penstock.adapters.seams import KvBatch
from penstock.kernel.values import KvRemoved, WorkerCard, WorkerId
from penstock.router.events import KvObserved
from penstock.runtime.kv_events import kv_event_feeds as module
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds

PATIENCE = 30.0


class Router:
    """What `KvEventFeeds` needs of the live run: it keeps what was posted."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.changed = asyncio.Event()

    def on(self, effect: type, carrier: Any) -> None:
        pass

    def post(self, machine: str, event: Any) -> None:
        assert isinstance(event, KvObserved), event
        self.heard.append(event.sequence)
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.heard) < count:
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
        await router.until(3)
        assert router.heard == [0, 1, 2]
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


class Announced:
    """A source whose past is asked for while it announces."""

    replay_endpoint = "asked"
    handshakes = SimpleNamespace(failed=0, failing=())

    def __init__(self, past: Sequence[KvBatch], live: Sequence[KvBatch]) -> None:
        self.past, self.live = past, live

    async def batches(self) -> AsyncIterator[KvBatch]:
        for batch in self.live:
            yield batch
        await asyncio.Event().wait()

    async def replay(self, first: int, timeout: float) -> Sequence[KvBatch]:
        return self.past

    def close(self) -> None:
        pass


def batch(number: int, block: int) -> KvBatch:
    return KvBatch(number, 0, [KvRemoved(hashes=[block])])


@pytest.mark.parametrize(
    ("live", "heard"),
    [
        ([batch(0, 5), batch(1, 6), batch(2, 7)], [0, 1, 2]),  # the first two came both ways
        ([batch(0, 8), batch(1, 6)], [0, 1, 0, 1]),  # another batch of a number that was there: a publisher began anew
    ],
)
async def test_what_comes_both_as_past_and_by_itself_is_posted_once(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch, live: list[KvBatch], heard: list[int]
) -> None:
    router = Router()
    feeds = KvEventFeeds(router)  # type: ignore[arg-type]
    source = Announced([batch(0, 5), batch(1, 6)], live)
    monkeypatch.setattr(feeds, "_source", lambda card, rank, endpoint: source)
    feeds.start(card(publisher))
    try:
        await router.until(len(heard))
        await asyncio.sleep(0)
        assert router.heard == heard
    finally:
        await feeds.close()
