"""Do KV events come over a real nats-server whole, whatever is lost, and does a late router learn the same index?"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.discovery_settings import DiscoverySettings, NatsSettings
from penstock.kernel.hashing import SCHEME
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvRemoved, KvStored, Target, WorkerCard, WorkerId
from penstock.router.events import OperatorNote, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.backends import open_relayed, open_relays
from penstock.runtime.kv_events import jetstream_history
from penstock.runtime.kv_events import kv_event_relay as module
from penstock.runtime.kv_events.jetstream_history import JetStreamHistory
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds
from penstock.runtime.kv_events.kv_event_relay import KvEventRelay, KvEventRelays
from penstock.runtime.kv_events.kv_relay_messages import SCHEME as RELAYED
from penstock.runtime.kv_events.kv_relay_messages import SnapshotPart, decode
from penstock.runtime.live_driver import LiveDriver
from tests.servers import Nats

PATIENCE = 30.0
SIZE = 4
SECRET = ClusterSecret("the secret of the relay tests")
TARGET = Target(WorkerId("w"))


async def until(condition: Callable[[], bool], story: Callable[[], Any] = lambda: None) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE:g} s: {story()}") from None


class Engine:
    """An engine of ours with random contents."""

    def __init__(self, *, opaque: bool = False) -> None:
        self.publisher = KvPublisher(secret=SECRET, buffer_steps=100_000)
        self.rng = random.Random(1)
        self.opaque = opaque
        self.held: set[int] = set()
        self.next = 1
        self.task = asyncio.create_task(self.publisher.serve_replay())

    @property
    def card(self) -> WorkerCard:
        return WorkerCard(
            id=WorkerId("w"),
            epoch=7,
            model="m",
            url="u",
            engine="sim",
            block_size=SIZE,
            hash_scheme=None if self.opaque else SCHEME,
            events=(self.publisher.endpoint,),
            replay=(self.publisher.replay_endpoint,),
            events_security=self.publisher.security,
            pid=id(self) % 30_000,
        )

    def work(self, steps: int) -> None:
        for _ in range(steps):
            if self.held and self.rng.random() < 0.4:
                gone = self.rng.choice(sorted(self.held))
                self.held.discard(gone)
                self.publisher.publish(1.0, [KvRemoved(hashes=[gone])])
            else:
                tokens = [self.next] * SIZE if self.opaque else []
                self.publisher.publish(1.0, [KvStored(hashes=[self.next], tokens=tokens, block_size=SIZE)])
                self.held.add(self.next)
                self.next += 1

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.publisher.close()


class Side:
    """One frontend's router, hearing KV events as its settings say."""

    def __init__(self, settings: ClusterSettings, card: WorkerCard, secret: ClusterSecret = SECRET) -> None:
        self.router = Router(RouterSettings(), name="r")
        self.live = LiveDriver({"router": self.router})
        self.live.on(OperatorNote, lambda now, sender, effect: None)
        self.relayed = open_relayed(settings, "r", secret)
        self.feeds = KvEventFeeds(self.live, secret, self.relayed)
        self.live.post("router", WorkerJoined(card=card))
        self.feeds.start(card)

    @property
    def held(self) -> set[int]:
        exact = self.router.pools["m"].index.exact
        assert exact is not None
        return exact.blocks_of(TARGET)

    @property
    def stream(self) -> Any:
        return self.router.pools["m"].index.streams[TARGET]

    async def close(self) -> None:
        await self.feeds.close()
        self.live.close()


class World:
    """One engine, its relay, and routers that come and go."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.relays: KvEventRelays | None = None
        self.engine: Engine | None = None
        self.sides: list[Side] = []

    def begin(self, **options: Any) -> Engine:
        self.engine = Engine(**options)
        self.relays = open_relays(self.settings, SECRET)
        assert self.relays is not None
        self.card = self.relays.announced(self.engine.card)
        return self.engine

    @property
    def relay(self) -> KvEventRelay:
        assert self.relays is not None
        return self.relays._relays["w"][1][0]

    def side(self, **options: Any) -> Side:
        self.sides.append(Side(self.settings, self.card, **options))
        return self.sides[-1]

    async def heard(self) -> None:
        """Wait until the relay has a connection and hears each batch as it comes: not many as one, by a replay."""
        engine, relays = self.engine, self.relays
        assert engine is not None and relays is not None
        await until(lambda: relays._link.client is not None)

        def some() -> bool:
            engine.work(1)  # what it says before it is subscribed to shows only with its next word
            return self.relay.next > 0

        await until(some)

    async def same(self, *sides: Side) -> None:
        """Wait until every index holds what the engine holds, translated or not, and nothing is on its way."""
        assert self.engine is not None
        engine = self.engine

        def settled() -> bool:
            if any(side.stream.state == "joining" for side in sides):
                return False
            if engine.opaque:
                return all(len(side.held) == len(engine.held) for side in sides) and len(self.relay.holdings) == len(
                    engine.held
                )
            return all(side.held == engine.held for side in sides)

        await until(settled, lambda: [(len(side.held), len(engine.held), side.stream.state) for side in sides])

    async def close(self) -> None:
        for side in self.sides:
            await side.close()
        if self.relays is not None:
            await self.relays.close()
        if self.engine is not None:
            await self.engine.close()


def settings_for(url: str, name: str, kv_events: str = "nats") -> ClusterSettings:
    servers = NatsSettings(urls=(url,))
    return ClusterSettings(name=name, discovery=DiscoverySettings(kv_events=kv_events, nats=servers))


@pytest.fixture
async def world(nats: Nats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "BEAT", 0.05)
    made = World(settings_for(nats.url, tmp_path.name))
    yield made
    await made.close()


@pytest.mark.parametrize("opaque", [False, True], ids=["our hashes", "the engine's hashes"])
async def test_early_and_late_routers_hold_what_the_engine_holds(world: World, opaque: bool) -> None:
    engine = world.begin(opaque=opaque)
    assert world.card.events == (f"{RELAYED}w/0@7",)
    assert (world.card.hash_scheme, world.card.events_security) == (SCHEME, None)
    early = world.side()
    engine.work(300)
    await world.same(early)
    late = world.side()
    await world.same(early, late)
    engine.work(300)
    await world.same(early, late)
    assert early.held == late.held
    assert (early.stream.state, late.stream.state) == ("exact", "exact")


async def test_who_asks_for_what_is_kept_no_more_is_told_everything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAYABLE", 10)
    engine = world.begin()
    engine.work(400)
    await until(lambda: world.relay.next == 400)
    late = world.side()
    await world.same(late)
    engine.work(50)
    await world.same(late)
    assert late.stream.state == "exact"
    assert late.stream.applied < 400


async def test_an_engine_that_was_there_before_its_relay_is_relayed_from_its_first_event(world: World) -> None:
    engine = world.begin()
    assert world.relays is not None
    await world.relays.close()
    engine.work(200)
    world.relays = open_relays(world.settings, SECRET)
    assert world.relays is not None
    world.card = world.relays.announced(engine.card)
    await world.same(world.side())


async def test_a_large_batch_travels_in_parts(world: World) -> None:
    engine = world.begin()
    side = world.side()
    events = [KvStored(hashes=list(range(n * 4000 + 1, n * 4000 + 4001)), block_size=SIZE) for n in range(30)]
    engine.held = {block for event in events for block in event.hashes}
    engine.publisher.publish(1.0, events)
    await world.same(side)
    late = world.side()
    await world.same(late)


async def test_messages_that_are_not_signed_with_our_secret_change_nothing(world: World) -> None:
    engine = world.begin()
    theirs = world.side(secret=ClusterSecret("another secret of the relay tests"))
    engine.work(20)
    ours = world.side()
    await world.same(ours)
    await until(lambda: theirs.feeds.refused == [TARGET])
    assert theirs.held == set()
    assert theirs.feeds.handshakes_failed > 0


async def test_a_worker_that_comes_back_has_one_relay_and_starts_anew(world: World) -> None:
    engine = world.begin()
    engine.work(100)
    side = world.side()
    await world.same(side)
    old, relays = world.relay, world.relays
    assert relays is not None
    relays.remove("w")
    await engine.close()
    again = world.engine = Engine()
    world.card = relays.announced(msgspec.structs.replace(again.card, epoch=8))
    again.work(30)
    late = world.side()
    await world.same(late)
    answered = old.answered
    assert (await late.feeds._subscribers[TARGET][0].replay(0, 5.0)) is not None
    assert (old.answered, late.stream.next) == (answered, 30)
    again.work(30)
    await world.same(late)


async def test_an_engine_that_goes_on_under_a_newer_epoch_keeps_its_relay(world: World) -> None:
    engine = world.begin()
    engine.work(100)
    relay, relays = world.relay, world.relays
    assert relays is not None
    world.card = relays.announced(msgspec.structs.replace(engine.card, epoch=9, labels={"was": "another"}))
    assert world.relay is relay
    assert (world.card.epoch, world.card.events) == (9, (f"{RELAYED}w/0@7",))
    await world.same(world.side())


async def test_a_frontend_without_nats_says_that_it_can_not_hear_relayed_events(world: World) -> None:
    world.begin()
    world.settings = ClusterSettings()
    side = world.side()
    await until(lambda: side.stream.unrecovered == 1)


async def test_what_a_dead_broker_swallowed_is_asked_for_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT", 0.05)
    server = Nats(tmp_path)
    server.start()
    world = World(settings_for(server.url, "cluster"))
    try:
        engine = world.begin()
        side = world.side()
        engine.work(100)
        await world.same(side)
        assert side.relayed is not None
        link = side.relayed.link
        for quiet in (True, False):
            server.kill()
            await until(lambda: link.problem is not None)
            engine.work(100)
            await until(lambda: world.relay.next == engine.publisher.next_sequence)
            assert side.held != engine.held
            server.start()
            if not quiet:  # the next event shows the gap, else the beat does
                await until(lambda: link.problem is None)
                engine.work(1)
            await world.same(side)
        assert side.stream.state == "exact"
    finally:
        await world.close()
        server.kill()


async def test_a_connection_whose_end_the_library_does_not_report_is_made_anew(tmp_path: Path) -> None:
    server = Nats(tmp_path)
    server.start()
    relayed = open_relayed(settings_for(server.url, "cluster"), "r", SECRET)
    assert relayed is not None
    link = relayed.link.start()
    try:
        await until(lambda: link.client is not None)
        first = link.client
        assert first is not None
        first._closed_cb = None  # as where closing fails midway
        server.kill()
        await until(lambda: first.is_closed)
        server.start()
        await until(lambda: link.client not in (None, first) and link.problem is None)
    finally:
        await link.close()
        server.kill()


# --- JetStream --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def durable(nats: Nats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(jetstream_history, "SNAPSHOT_EVERY", 50)
    monkeypatch.setattr(jetstream_history, "EVENTS_MAX", 100)
    made = World(settings_for(nats.url, tmp_path.name, "jetstream"))
    yield made
    await made.close()


async def test_a_router_that_starts_late_learns_the_index_from_jetstream(durable: World) -> None:
    engine = durable.begin()
    await durable.heard()
    early = durable.side()
    engine.work(330)
    await durable.same(early)
    relay = durable.relay
    assert relay._durable is not None
    await until(lambda: relay._durable is not None and relay._durable.snapshots >= 6)
    await until(lambda: relay._outbox.empty())
    asked = relay.answered
    late = durable.side()
    await durable.same(early, late)
    assert relay.answered == asked  # nobody asked the relay
    assert late.stream.applied < 330  # the first hundreds came as one snapshot
    engine.work(100)
    await durable.same(early, late)
    assert early.held == late.held


async def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_again(durable: World) -> None:
    engine = durable.begin()
    await durable.heard()
    engine.work(200)
    relay, where = durable.relay, durable.relay._subjects["kv"]
    history = relay._durable
    assert history is not None
    await until(lambda: history.snapshots > 0 and relay._outbox.empty())
    js = await history._made()
    assert js is not None
    read, replaced = history._messages, 0

    async def slow(js: Any, stream: str, *words: Any) -> list[bytes]:
        nonlocal replaced
        if stream.startswith("OBJ_") and replaced < 2:
            replaced += 1
            await history._write(js, where, relay._whole)  # it drops the chunks whose name is known by now
        return await read(js, stream, *words)

    history._messages = slow  # type: ignore[method-assign]
    parts = await history.past(where, 7, lambda raw: decode(SnapshotPart, raw, where, SECRET))
    assert replaced == 2
    assert parts[0].whole
    assert parts[-1].sequence == relay.next - 1


async def test_a_beat_does_not_ask_for_what_is_being_asked_for(durable: World, monkeypatch: pytest.MonkeyPatch) -> None:
    past = JetStreamHistory.past

    async def slow(self: JetStreamHistory, *words: Any) -> Any:
        await asyncio.sleep(10 * module.BEAT)
        return await past(self, *words)

    monkeypatch.setattr(JetStreamHistory, "past", slow)
    engine = durable.begin()
    await durable.heard()
    engine.work(60)
    await until(lambda: durable.relay.next == engine.publisher.next_sequence)
    await until(lambda: durable.relay._outbox.empty())
    await durable.same(durable.side())
    assert durable.relay.answered == 0


async def test_jetstream_that_lost_its_disk_is_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.05)
    server = Nats(tmp_path, jetstream=True)
    server.start()
    monkeypatch.setattr(jetstream_history, "SNAPSHOT_EVERY", 50)
    world = World(settings_for(server.url, "cluster", "jetstream"))
    try:
        engine = world.begin()
        early = world.side()
        engine.work(120)
        await world.same(early)
        server.kill()
        for path in sorted(server.data.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        engine.work(20)
        server.start()
        await world.same(early)
        engine.work(80)
        await world.same(early)
        late = world.side()
        await world.same(early, late)
        assert late.stream.state == "exact"
    finally:
        await world.close()
        server.kill()


async def test_without_jetstream_in_the_server_the_relay_is_asked(tmp_path: Path) -> None:
    server = Nats(tmp_path)
    server.start()
    world = World(settings_for(server.url, "cluster", "jetstream"))
    try:
        engine = world.begin()
        await world.heard()  # a side that is there before the first word has nothing to ask
        engine.work(50)
        side = world.side()
        await world.same(side)
        await until(lambda: world.relay.answered >= 1)
    finally:
        await world.close()
        server.kill()


async def test_nothing_stays_in_jetstream_of_a_worker_that_is_gone(durable: World) -> None:
    engine = durable.begin()
    engine.work(120)
    side = durable.side()
    await durable.same(side)
    relay, relays = durable.relay, durable.relays
    assert relay._durable is not None and relays is not None
    where = relay._subjects["kv"]
    await until(lambda: relay._durable is not None and relay._durable.snapshots >= 1)
    relays.remove("w")
    await until(lambda: not relays._leaving)
    assert await relay._durable.past(where, 7, lambda raw: pytest.fail("something stayed")) == []
