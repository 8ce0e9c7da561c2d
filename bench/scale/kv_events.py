"""What do the KV events of 500 engines cost a frontend: steady, in a burst of all at once, and when one joins late?

usage: python bench/scale/kv_events.py [--engines N] [--history N] [--seconds S] [--burst N] [--docs PAGE]

One process is all engines: a PUB socket and a replay socket for each, in vLLM's format, every event 64 new blocks with
their tokens. This process hears them as a frontend does, with the router, its index and its journal; a further one
joins when it knows all, as a second frontend does.
"""

import argparse
import asyncio
import gc
import multiprocessing
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
import zmq
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench/gateway")]

from run import machine  # noqa: E402
from table import page_with  # noqa: E402

from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher  # noqa: E402
from penstock.adapters.listen_address import free_port  # noqa: E402
from penstock.adapters.stores.memory_store import MemoryStore  # noqa: E402
from penstock.frontend.frontend_process import GC_THRESHOLD  # noqa: E402
from penstock.kernel.machine import Effect, Event, Nanos  # noqa: E402
from penstock.kernel.values import KvEvent, KvRemoved, KvStored, Target, WorkerCard, WorkerId  # noqa: E402
from penstock.router.events import KvObserved, OperatorNote, WorkerJoined  # noqa: E402
from penstock.router.journal import router_book  # noqa: E402
from penstock.router.kv_index.exact_index import ExactIndex  # noqa: E402
from penstock.router.router import Router  # noqa: E402
from penstock.router.settings import RouterSettings  # noqa: E402
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard  # noqa: E402
from penstock.runtime.kv_events.kv_event_feeds import KvEventFeeds  # noqa: E402
from penstock.runtime.kv_events.peer_blocks import PATH, PeerBlocksClient, blocks_of  # noqa: E402
from penstock.runtime.live_driver import LiveDriver  # noqa: E402
from penstock.runtime.loop_monitor import LoopMonitor  # noqa: E402
from penstock.runtime.records.journal_writer import JournalWriter  # noqa: E402

MODEL, BLOCK, BLOCKS = "m", 16, 64
RATE = 200.0
"""Events per second of all engines together."""
ROOM = 32
"""Events whose blocks an engine keeps: the oldest of them is removed for each further one."""
JOURNAL_BATCH = 64
PATIENCE = 60.0
SAMPLED = 20
REST = 5.0
"""Seconds."""


class Engines:
    """All engines of the fleet. ``said``: (engine, sequence) -> when it was published, in seconds since 1970."""

    def __init__(self, count: int) -> None:
        zmq.Context.instance().max_sockets = 4 * count + 64
        self.publishers = [KvPublisher() for _ in range(count)]
        self.said: dict[tuple[int, int], float] = {}
        self._held: list[list[list[int]]] = [[] for _ in range(count)]
        self._random = random.Random(1)

    def publish(self, engine: int) -> None:
        """Let an engine store 64 blocks, and remove as many where it is full."""
        events: list[KvEvent] = []
        held = self._held[engine]
        if len(held) == ROOM:
            events.append(KvRemoved(hashes=held.pop(0)[::-1]))
        hashes = [self._random.getrandbits(64) for _ in range(BLOCKS)]
        tokens = [self._random.getrandbits(17) for _ in range(BLOCKS * BLOCK)]
        events.append(KvStored(hashes=hashes, tokens=tokens, block_size=BLOCK))
        held.append(hashes)
        now = time.time()
        self.said[engine, self.publishers[engine].publish(now, events)] = now

    async def steadily(self, seconds: float) -> None:
        """Publish `RATE` events a second, of one engine after the other."""
        began, count = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            while count < passed * RATE:
                self.publish(count % len(self.publishers))
                count += 1
            await asyncio.sleep(0.002)


def engines(count: int, parent: Connection) -> None:
    """Run the fleet, and publish as the parent says."""

    async def run() -> None:
        fleet = Engines(count)
        serving = [asyncio.create_task(each.serve_replay()) for each in fleet.publishers]
        parent.send([(each.endpoint, each.replay_endpoint) for each in fleet.publishers])
        while True:
            work, amount = await asyncio.to_thread(parent.recv)
            if work == "end":
                break
            fleet.said.clear()
            if work == "steady":
                await fleet.steadily(amount)
            else:
                for _ in range(int(amount)):
                    for engine in range(count):
                        fleet.publish(engine)
                    await asyncio.sleep(0)
            parent.send(fleet.said)
        for task in serving:
            task.cancel()

    asyncio.run(run())


class Frontend:
    """What hears the fleet. ``heard``: (worker, sequence) -> when the index had it, in seconds since 1970."""

    def __init__(
        self, cards: Sequence[WorkerCard], folder: Path, name: str, peers: PeerBlocksClient | None = None
    ) -> None:
        self.cards = cards
        self.heard: dict[tuple[str, int], float] = {}
        self.router = Router(RouterSettings(), name=name, seed=1)
        self._journal = JournalWriter(folder / name, router_book(self.router), wall_ns=0, batch=JOURNAL_BATCH)
        self._journal.begin(0)
        self._writing = asyncio.create_task(self._write())
        self.live = LiveDriver({"router": self.router}, watch=self._watch)
        self.live.on(OperatorNote, lambda now, sender, effect: None)
        self.feeds = KvEventFeeds(self.live, peers=peers)

    def join(self) -> None:
        for card in self.cards:
            self.live.post("router", WorkerJoined(card=card))
            self.feeds.start(card)

    def _watch(self, now: Nanos, name: str, event: Event, effects: Sequence[Effect]) -> None:
        self._journal.watch(now, name, event, effects)
        if isinstance(event, KvObserved):
            self.heard[event.worker, event.sequence] = time.time()

    async def told(self, request: web.Request) -> web.Response:
        """Answer another frontend, as the route of a frontend does."""
        target = Target(WorkerId(request.match_info["worker"]), int(request.match_info["rank"]))
        blocks = blocks_of(self.router, target, self.feeds.digest)
        return web.Response(status=404) if blocks is None else web.Response(body=msgspec.msgpack.encode(blocks))

    def holds(self) -> dict[Target, set[int]]:
        """Return what the index says of one engine in `SAMPLED`."""
        exact = self.router.pools[MODEL].index.exact
        assert isinstance(exact, ExactIndex)
        return {target: exact.blocks_of(target) for target in sorted(exact.targets())[::SAMPLED]}

    @property
    def journal(self) -> JournalWriter:
        return self._journal

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._journal.encode()
            await asyncio.to_thread(self._journal.flush)

    @property
    def streams(self) -> Any:
        return self.router.pools[MODEL].index.streams.values()

    @property
    def pairs(self) -> int:
        exact = self.router.pools[MODEL].index.exact
        assert exact is not None
        return len(exact)

    async def until(self, next_number: int) -> bool:
        """Wait until every stream is exact up to a number; return whether that came in time."""
        end = time.monotonic() + PATIENCE
        while any(stream.next < next_number or stream.state != "exact" for stream in self.streams):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        self._writing.cancel()
        await self.feeds.close()
        self.live.close()


class Row(NamedTuple):
    """What one phase cost. ``lag``: (median, p99, longest) seconds from publication to the index."""

    what: str
    seconds: float
    blocks: int
    cpu: float
    lag: tuple[float, float, float] | None
    missing: int
    late: float
    """How late the event loop was, 99th percentile: what a step of a request waits in addition, the machine's other
    work included."""
    held: float
    """Longest that this process held its loop."""

    def line(self) -> str:
        """Return its row of the table."""
        lag = ("", "", "") if self.lag is None else tuple(f"{1000 * each:,.1f}" for each in self.lag)
        per_million = f"{self.cpu / self.blocks * 1e6:.1f}" if self.blocks else ""
        return (
            f"| {self.what} | {self.seconds:.1f} | {self.blocks:,} | {self.cpu:.2f} | {per_million} | "
            f"{' | '.join(lag)} | {self.missing:,} | {1000 * self.late:.1f} | {1000 * self.held:.1f} |"
        )


HEAD = (
    "| | s | blocks | CPU s | CPU s per million blocks | lag p50, ms | p99, ms | max, ms | events not heard | "
    "loop late p99, ms | loop held max, ms |"
)


class Fleet:
    """The other end of the pipe to the engines."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def publish(self, work: str, amount: float) -> dict[tuple[int, int], float]:
        """Let the engines publish; return what they published, and when."""
        self._pipe.send((work, amount))
        said: dict[tuple[int, int], float] = await asyncio.to_thread(self._pipe.recv)
        return said


class Watch:
    """CPU, time and lateness of the loop while something goes on."""

    def __init__(self) -> None:
        self.monitor = LoopMonitor()
        self.delays: list[float] = []
        self.monitor.observe = self.delays.append

    @contextmanager
    def phase(self, rows: list[Row], what: str) -> Iterator[dict[str, Any]]:
        self.delays.clear()
        self.monitor.take_recent()
        told: dict[str, Any] = {"blocks": 0, "lags": [], "missing": 0}
        cpu, began = time.process_time(), time.monotonic()
        yield told
        cpu, seconds = time.process_time() - cpu, time.monotonic() - began
        delays = sorted(self.delays) or [0.0]
        late, held = delays[int(len(delays) * 0.99)], self.monitor.take_recent()
        lags = sorted(told["lags"])
        lag = (lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1]) if lags else None
        rows.append(Row(what, seconds, told["blocks"], cpu, lag, told["missing"], late, held))
        print(rows[-1].line(), file=sys.stderr, flush=True)


async def measured(options: argparse.Namespace, pipe: Connection, folder: Path) -> tuple[list[Row], list[str]]:
    """Return the rows, and further lines."""
    rows: list[Row] = []
    watch = Watch()
    watching = asyncio.create_task(watch.monitor.run())
    ends = await asyncio.to_thread(pipe.recv)
    fleet = Fleet(pipe)
    cards = [
        WorkerCard(
            id=WorkerId(f"main-{number}"),
            url=f"http://10.0.0.1:{number}",
            model=MODEL,
            engine="vllm",
            block_size=BLOCK,
            hash_scheme="vllm",
            epoch=1,
            events=(events,),
            replay=(replay,),
        )
        for number, (events, replay) in enumerate(ends)
    ]
    for _ in range(options.history):
        await fleet.publish("burst", 1)
    due = options.history
    frontend = Frontend(cards, folder, "f0")

    async def settle(told: dict[str, Any], published: dict[tuple[int, int], float], numbers: int) -> None:
        told["in_time"] = await frontend.until(numbers)
        heard = {(f"main-{engine}", number): at for (engine, number), at in published.items()}
        told["lags"] = [frontend.heard[key] - at for key, at in heard.items() if key in frontend.heard]
        told["missing"] = len(heard.keys() - frontend.heard.keys())
        told["blocks"] = BLOCKS * (len(heard) - told["missing"])

    fds, threads = _fds(), threading.active_count()
    with watch.phase(rows, f"{options.engines} engines join, each with {options.history} events before") as told:
        frontend.join()
        exact = await frontend.until(due)
        told["blocks"] = BLOCKS * len(frontend.heard)
        told["missing"] = options.history * options.engines - len(frontend.heard)
    with watch.phase(rows, f"{REST:g} s at rest"):
        await asyncio.sleep(REST)
    more = [
        f"Joined: {sum(each.state == 'exact' for each in frontend.streams)} exact of {options.engines}"
        f"{'' if exact else ' (not all in a minute)'}; {_fds() - fds:,} file descriptors, "
        f"{len(asyncio.all_tasks()):,} tasks, {threading.active_count() - threads} threads, "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,} MiB at most, {frontend.pairs:,} pairs."
    ]
    print(more[-1], file=sys.stderr)
    frontend.heard.clear()
    with watch.phase(rows, f"{options.seconds:g} s at {RATE:g} events/s") as told:
        published = await fleet.publish("steady", options.seconds)
        due += len(published) // options.engines
        await settle(told, published, due)
    frontend.heard.clear()
    with watch.phase(rows, f"all publish {options.burst} events at once") as told:
        published = await fleet.publish("burst", options.burst)
        due += options.burst
        await settle(told, published, due)
    async with served(frontend) as store:
        for name, peers, what in (
            ("f1", PeerBlocksClient(store, "f1", None), "a frontend joins late, told by the first one"),
            ("f2", None, "the same, told by the engines alone"),
        ):
            late = Frontend(cards, folder, name, peers)
            with watch.phase(rows, what) as told:
                late.join()
                exact = await late.until(due)
                told["blocks"] = late.pairs if peers else BLOCKS * len(late.heard)
            alike = late.holds() == frontend.holds()
            more.append(
                f"The one that was {'told by the first one' if peers else 'told by the engines'}: "
                f"{sum(each.state == 'exact' for each in late.streams)} of {options.engines} exact, its index "
                f"{'is the same' if alike else 'is ANOTHER'}"
                + (f", {peers.taken} engines by the first frontend." if peers else ".")
            )
            print(more[-1], file=sys.stderr)
            await late.close()
    gaps, lost = (sum(getattr(each, name) for each in frontend.streams) for name in ("gaps", "unrecovered"))
    more.append(
        f"A new segment of the journal held the loop up for {1000 * frontend.journal.longest_snapshot:.0f} ms at most"
        + ("" if frontend.journal.ended is None else f"; it ended: {frontend.journal.ended}")
        + "."
    )
    more.append(f"Gaps in numbers: {gaps}, of which could not be closed: {lost}.")
    await frontend.close()
    watching.cancel()
    return rows, more


@asynccontextmanager
async def served(frontend: Frontend) -> AsyncIterator[MemoryStore]:
    """Let other frontends ask this one; yield the store where they find it."""
    app = web.Application()
    app.router.add_get(PATH, frontend.told)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    store = MemoryStore()
    url = f"http://127.0.0.1:{port}"
    card = FrontendCard(id="f0", url=url, admin_url=url, pid=0, plane="", run="")
    await store.put(FRONTENDS + "f0", msgspec.json.encode(card))
    try:
        yield store
    finally:
        await runner.cleanup()


def _fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument("--history", type=int, default=48, help="events of each engine before the first frontend comes")
    parser.add_argument("--seconds", type=float, default=10.0, help="of steady events")
    parser.add_argument("--burst", type=int, default=20, help="events of each engine at once")
    parser.add_argument("--docs", type=Path, help="page whose table is replaced")
    options = parser.parse_args(arguments)
    gc.set_threshold(*GC_THRESHOLD)  # as a frontend does
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engines, args=(options.engines, theirs), daemon=True)
    process.start()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-kv-events-") as folder:
            rows, more = uvloop.run(measured(options, ours, Path(folder)))
    finally:
        process.terminate()
    on = machine()
    lines = [
        f"{on['date']}, {on['cpu']}, {on['cores']} cores, Python {on['python']}; {options.engines} engines, each "
        f"event {BLOCKS} blocks of {BLOCK} tokens",
        "",
        HEAD,
        "|---" + "|---:" * 10 + "|",
        *(row.line() for row in rows),
        "",
        *(f"- {line}" for line in more),
    ]
    text = "\n".join(lines)
    print(text)
    if options.docs is not None:
        options.docs.write_text(page_with(options.docs.read_text(), text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
