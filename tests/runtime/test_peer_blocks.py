"""Does a frontend that joins late know what one knows that was there from the start, and say what it does not know?"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.adapters.engines.kv_events import kv_poller
from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher
from penstock.adapters.listen_address import free_port
from penstock.adapters.stores.memory_store import MemoryStore
from penstock.kernel.values import KvEvent, KvRemoved, KvStored, Target, WorkerCard, WorkerId
from penstock.router.events import Arrived, Closed, Dispatch, Finished, FirstToken, OperatorNote, WorkerJoined
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard
from penstock.runtime.kv_events import kv_event_feeds
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds
from penstock.runtime.kv_events.peer_blocks import PATH, PeerBlocks, PeerBlocksClient, blocks_of
from penstock.runtime.live_driver import LiveDriver
from penstock.testing.router_world import arrived

SIZE = 4
PATIENCE = 60.0


class Engine:
    """An engine that names its blocks as it likes, of a small cache; it replays its last batches."""

    def __init__(self, number: int, kept: int) -> None:
        self.publisher = KvPublisher(buffer_steps=kept)
        self.serving = asyncio.create_task(self.publisher.serve_replay())
        self.card = WorkerCard(
            id=WorkerId(f"w{number}"),
            epoch=1,
            model="m",
            url="u",
            engine="vllm",
            block_size=SIZE,
            hash_scheme="vllm",
            events=(self.publisher.endpoint,),
            replay=(self.publisher.replay_endpoint,),
        )
        self._random = random.Random(number)
        self._chains: list[list[int]] = []
        """Contents of the blocks of each conversation that it holds."""

    def work(self, steps: int) -> None:
        """Begin conversations, which other engines have as well, go on with some, and drop the ends of others."""
        for _ in range(steps):
            kind, chains = self._random.random(), self._chains
            events: list[KvEvent] = []
            if kind < 0.3 and chains:
                chain = self._random.choice(chains)
                gone = []
                for _ in range(min(len(chain), self._random.randint(1, 4))):
                    gone.append(name_of(chain))
                    chain.pop()
                events.append(KvRemoved(hashes=gone))
                chains[:] = [each for each in chains if each]
            else:
                chain = self._random.choice(chains) if chains and kind < 0.6 else []
                parent = name_of(chain) if chain else None
                if not chain:
                    chains.append(chain)
                added = [self._random.choice((0, 0, 1, 2)) for _ in range(self._random.randint(1, 5))]
                names = [name_of([*chain, *added[: end + 1]]) for end in range(len(added))]
                tokens = [content for content in added for _ in range(SIZE)]
                events.append(KvStored(hashes=names, parent=parent, tokens=tokens, block_size=SIZE))
                chain += added
            self.publisher.publish(1.0, events)

    async def close(self) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.publisher.close()


def name_of(chain: list[int]) -> int:
    """Return what all engines call the last block of a conversation."""
    return int.from_bytes(hashlib.sha256(repr(chain).encode()).digest()[:8], "big")


class Side:
    """A frontend's router, and what feeds it."""

    def __init__(self, engines: list[Engine], peers: PeerBlocksClient | None = None) -> None:
        self.router = Router(RouterSettings(), name="r", seed=1)
        self.live = LiveDriver({"router": self.router})
        self.dispatched: list[Dispatch] = []
        self.live.on(OperatorNote, lambda now, sender, effect: None)
        self.live.on(Closed, lambda now, sender, effect: None)
        self.live.on(Dispatch, lambda now, sender, effect: self.dispatched.append(effect))
        self.feeds = KvEventFeeds(self.live, peers=peers)
        self.engines = engines
        for engine in engines:
            self.live.post("router", WorkerJoined(card=engine.card))
            self.feeds.start(engine.card)

    @property
    def index(self) -> ExactIndex:
        exact = self.router.pools["m"].index.exact
        assert isinstance(exact, ExactIndex)
        return exact

    @property
    def states(self) -> list[str]:
        return [self.router.pools["m"].index.kv_state(Target(engine.card.id)) for engine in self.engines]

    def stream(self, engine: Engine) -> Any:
        return self.router.pools["m"].index.streams[Target(engine.card.id)]

    async def current(self) -> None:
        """Wait until all is known of every engine."""
        await until(
            lambda: all(
                self.stream(engine).next == engine.publisher.next_sequence and self.stream(engine).state == "exact"
                for engine in self.engines
            ),
            lambda: self.states,
        )

    async def close(self) -> None:
        await self.feeds.close()
        self.live.close()


async def until(met: Callable[[], object], story: Callable[[], object] = lambda: None) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while not met():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(story()) from None


@asynccontextmanager
async def asked(answer: Callable[[Target], PeerBlocks | None], gate: asyncio.Event | None = None) -> AsyncIterator[Any]:
    """Serve what another frontend would; yield a maker of clients."""

    async def handle(request: web.Request) -> web.Response:
        if gate is not None:
            await gate.wait()
        blocks = answer(Target(WorkerId(request.match_info["worker"]), int(request.match_info["rank"])))
        return web.Response(status=404) if blocks is None else web.Response(body=msgspec.msgpack.encode(blocks))

    app = web.Application()
    app.router.add_get(PATH, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
    store, url = MemoryStore(), f"http://127.0.0.1:{port}"
    for name, at in (("other", url), ("dead", f"http://127.0.0.1:{free_port()}"), ("me", "http://never")):
        card = FrontendCard(id=name, url=at, admin_url=at, pid=0, plane="", run="")
        await store.put(FRONTENDS + name, msgspec.json.encode(card))
    yield lambda: PeerBlocksClient(store, "me", None)
    await runner.cleanup()


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    made = [Engine(number, kept=8) for number in range(5)]
    yield made
    for engine in made:
        await engine.close()


def told_by(side: Side) -> Callable[[Target], PeerBlocks | None]:
    return lambda target: blocks_of(side.router, target, side.feeds.digest)


def same(one: Side, other: Side) -> bool:
    """Return whether two indexes say the same of all engines: blocks, and the copies of each."""
    return all(
        one.index.blocks_of(target) == other.index.blocks_of(target) and copies(one, target) == copies(other, target)
        for target in (Target(engine.card.id) for engine in one.engines)
    )


def copies(side: Side, target: Target) -> Counter[int]:
    """Return how often each block of an engine was announced, and not ended."""
    return Counter(block for event in side.index.dump(target) for block in event.blocks or ())


async def test_one_that_joins_late_knows_what_one_knows_that_was_there_from_the_start(engines: list[Engine]) -> None:
    first = Side(engines)
    try:
        for _ in range(10):
            for engine in engines:
                engine.work(6)  # the last 8 can be replayed
            await first.current()
        async with asked(told_by(first)) as client:
            late = Side(engines, peers := client())
            for _ in range(6):  # its engines do not wait for it
                for engine in engines:
                    engine.work(1)
                await asyncio.sleep(0)
            await first.current()
            await late.current()
            assert peers.taken == len(engines) and same(first, late)
            for _ in range(20):  # removals and parents by the engines' own names
                for engine in engines:
                    engine.work(5)
                await first.current()
                await late.current()
                assert same(first, late)
            late.index.check()
            assert all(late.stream(engine).unrecovered == 0 for engine in engines)
            alone = Side(engines)
            await until(lambda: "joining" not in alone.states and "recovering" not in alone.states)
            assert set(alone.states) <= {"late", "approximate"}, "the engines alone can't tell it"
            await alone.close()
            await late.close()
    finally:
        await first.close()


@pytest.mark.parametrize("wrong", ["digest", "number", "incarnation", "endpoint"])
async def test_what_is_said_of_another_process_is_not_believed(wrong: str) -> None:
    engine = Engine(0, kept=10_000)
    first = Side([engine])
    engine.work(50)
    await first.current()

    def answer(target: Target) -> PeerBlocks | None:
        blocks = told_by(first)(target)
        assert blocks is not None and blocks.digest is not None
        changes: dict[str, Any] = {
            "digest": {"digest": blocks.digest ^ 1},
            "number": {"sequence": 1_000},
            "incarnation": {"incarnation": 2},
            "endpoint": {"endpoint": "tcp://127.0.0.1:1"},
        }
        false = [KvStored(hashes=[1], blocks=[2], block_size=SIZE)]
        return msgspec.structs.replace(blocks, events=false, **changes[wrong])

    async with asked(answer) as client:
        late = Side([engine], client())
        await late.current()
        assert same(first, late)
        await late.close()
    await first.close()
    await engine.close()


async def test_until_it_is_told_it_routes_by_what_it_knows_and_says_so(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_feeds, "JOINING_SHOWN", -1.0)
    first, gate = Side(engines), asyncio.Event()
    for engine in engines:
        engine.work(6)
    await first.current()
    async with asked(told_by(first), gate) as client:
        late = Side(engines, client())
        assert set(late.states) == {"joining"}
        status = late.router.status(late.live.now())
        assert status.models[0].index == "mixed" and {worker.index for worker in status.workers} == {"joining"}
        for number in range(3):
            event = arrived_again(number)
            late.live.post("router", event)
            late.live.post("router", FirstToken(id=event.id, attempt=1))
            late.live.post("router", Finished(id=event.id, attempt=1, tokens=1))
        assert len({effect.target for effect in late.dispatched}) == 1, "the same prompt goes where it went before"
        last = late.dispatched[-1]
        assert [row.index for row in last.decision.candidates if row.target == last.target] == ["approximate"]
        [finding] = late.feeds.findings()
        assert f"{len(engines)} of {len(engines)} engines" in finding.text and finding.level == "info"
        gate.set()
        await late.current()
        await until(lambda: late.feeds.joining == 0)
        assert not late.feeds.findings()
        assert same(first, late)
        await late.close()
    await first.close()


def arrived_again(number: int) -> Arrived:
    return msgspec.structs.replace(arrived(f"{number:016x}", 64), model="m")


async def test_events_that_waited_too_long_are_missing_until_they_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is skipped shows as a gap, and no block is claimed or missed at the end; late is said to be late."""
    engine = Engine(0, kept=10_000)
    side, patient = Side([engine]), Side([engine])
    engine.work(10)
    await side.current()
    await patient.current()
    monkeypatch.setattr(kv_poller, "LAG_MAX", -1.0)
    monkeypatch.setattr(kv_event_feeds, "LAG_SHOWN", -1.0)
    for _ in range(20):
        engine.work(30)
        await asyncio.sleep(0)
    await side.current()
    monkeypatch.undo()
    await patient.current()
    stream = side.stream(engine)
    assert side.feeds.poller.skipped > 0 and stream.gaps > 0 and stream.unrecovered == 0
    assert same(side, patient)
    monkeypatch.setattr(kv_event_feeds, "LAG_SHOWN", -1.0)
    [finding] = side.feeds.findings()
    assert f"{side.feeds.poller.skipped:,} batch" in finding.text and finding.level == "warning"
    for each in (side, patient):
        await each.close()
    await engine.close()
