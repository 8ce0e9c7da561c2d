"""Wishes in the store come true: scaling, drains, restarts; and what is waited for before an engine may go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.connectors.engine_process import EngineTemplate
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.live_knobs import SettingChange
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.runtime.cluster_state import membership_ack
from penstock.runtime.cluster_state.current_settings import CurrentSettings, desire_settings
from penstock.runtime.cluster_state.desired_state import (
    ACKS,
    DESIRED,
    DRAINED,
    DRAINS,
    LEAVING,
    POOLS,
    RESTART,
    RESTARTED,
    SETTINGS,
    DrainAck,
    DrainSpec,
    DrainStatus,
    MembershipAcks,
    PoolSpec,
    PoolStatus,
    RestartSpec,
    RestartStatus,
    SettingSpec,
    decode,
    put,
)
from penstock.runtime.cluster_state.membership_ack import (
    DrainProgress,
    MembershipAck,
    acknowledged_by_all,
    acks_in,
    running,
)
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.supervision import reconciler, status_writer
from penstock.runtime.supervision.fleet_driver import RequestCount
from penstock.runtime.supervision.reconciler import Reconciler
from penstock.runtime.supervision.status_writer import StatusWriter, reports_in, requests_left
from penstock.testing import RouterWorld, arrived, card
from tests.adapters.connectors.holding import PATIENCE, Ward, tiny


async def until(met: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            found = met()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


class FakeFrontends:
    """Two frontends that can be drained, started and replaced."""

    indices = range(2)

    def __init__(self) -> None:
        self.told: list[str] = []
        self.broken = False

    async def park(self, index: int) -> bool:
        self.told.append(f"park {index}")
        return True

    async def unpark(self, index: int) -> None:
        self.told.append(f"unpark {index}")

    async def replace(self, index: int) -> None:
        if self.broken:
            raise OSError("no more processes")
        self.told.append(f"replace {index}")


class FakeFleet:
    """A fleet of tiny engines, without routers."""

    def __init__(self, ward: Ward) -> None:
        self.driver = ward.connector
        self.changed = asyncio.Event()
        self.post = ward.connector.post

    async def watch(self) -> None:
        async for _ in self.driver.watch():
            self.changed.set()

    def reports(self) -> dict[str, PoolStatus]:
        return {name: PoolStatus(pool=pool, kind="process") for name, pool in self.driver.fleet.pools().items()}


class Scene:
    """A supervisor's operator and restarter over tiny engines, and a store to wish in."""

    def __init__(self, ward: Ward) -> None:
        self.ward = ward
        self.space = MemorySpace()
        self.store = MemoryStore(self.space)
        self.fleet: Any = FakeFleet(ward)
        self.frontends: Any = FakeFrontends()
        theirs = MemoryStore(self.space)
        self.operator = Reconciler(theirs, self.fleet, ttl=10, frontends=self.frontends)
        statuses = StatusWriter(theirs, ttl=10)
        ward.nurse.replace, ward.nurse.report = self.frontends.replace, statuses.add
        works = (self.operator.run(), statuses.run(), self.fleet.watch())
        self.tasks = [asyncio.create_task(work) for work in works]

    async def ids(self) -> list[str]:
        return sorted(await self.ward.pids())

    async def record(self, key: str, kind: type[Any]) -> Any:
        raw = (await self.store.list(key)).get(key)
        return None if raw is None else decode(kind, raw)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.ward.close()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[Scene] = []

    async def build(replicas: int = 2, gpus: tuple[int, ...] = (), each: int = 0) -> Scene:
        ward = Ward(tmp_path / "ward", gpus=gpus)
        made.append(Scene(await ward.up(replicas, EngineTemplate("main", tiny, each))))
        return made[-1]

    yield build
    for one in made:
        await one.close()


async def test_a_report_of_all_replicas_is_not_written_for_each_event(scene, monkeypatch):
    monkeypatch.setattr(reconciler, "EVERY", 3600.0)
    written = []
    put_one = MemoryStore.put

    async def counted(store, key, value, *, ttl=None):
        written.append(key)
        await put_one(store, key, value, ttl=ttl)

    monkeypatch.setattr(MemoryStore, "put", counted)
    here = await scene(2)
    for replicas in (4, 1, 3):
        await put(here.store, DESIRED + "main", PoolSpec(replicas=replicas))
        await here.ward.settled(ready=replicas)
    assert written.count(POOLS + "main") == 1


async def test_a_pool_becomes_what_is_wished_and_says_so(scene):
    here = await scene(2)
    wish = PoolSpec(replicas=4)
    await put(here.store, DESIRED + "main", wish)
    await here.ward.settled(ready=4)

    async def said() -> bool:
        report = await here.record(POOLS + "main", PoolStatus)
        return report is not None and report.revision == wish.revision and report.pool.ready == 4

    await until(said)
    await here.store.delete(DESIRED + "main")
    await here.ward.settled(ready=2)


async def test_wishes_for_what_others_have_are_left_to_them(scene):
    here = await scene(1)
    await put(here.store, DESIRED + "elsewhere", PoolSpec(replicas=4))
    await put(here.store, DRAINS + "elsewhere-0", DrainSpec())
    await put(here.store, DESIRED + "main", PoolSpec(replicas=2))
    await here.ward.settled(ready=2)


async def test_more_than_there_can_be_is_told_and_changes_nothing(scene):
    here = await scene(1, gpus=(0, 1), each=1)
    await put(here.store, DESIRED + "main", PoolSpec(replicas=3))

    async def told() -> bool:
        report = await here.record(POOLS + "main", PoolStatus)
        return report is not None and report.pool.problem is not None

    await until(told)
    assert "0 to 2 replicas, not 3" in (await here.record(POOLS + "main", PoolStatus)).pool.problem
    assert await here.ids() == ["main-0"]


async def test_a_drained_engine_stays_away_until_that_is_undone_or_the_pool_is_scaled(scene):
    here = await scene(3)
    await put(here.store, DRAINS + "main-1", DrainSpec())
    await here.ward.settled(ready=2)
    assert await here.ids() == ["main-0", "main-2"]
    assert here.fleet.driver.fleet.state.pools["main"].drains["main-1"].timeout is None
    await here.store.delete(DRAINS + "main-1")
    await here.ward.settled(ready=3)
    assert await here.ids() == ["main-0", "main-1", "main-2"]
    await put(here.store, DRAINS + "main-0", DrainSpec())
    await here.ward.settled(ready=2)
    await put(here.store, DESIRED + "main", PoolSpec(replicas=3))
    await here.ward.settled(ready=3)
    assert await here.ids() == ["main-0", "main-1", "main-2"], "a later scaling counts what runs"


async def test_a_frontend_is_drained_and_let_in_again(scene):
    here = await scene(1)
    wish = DrainSpec()
    await put(here.store, DRAINS + "frontend-1", wish)

    async def done() -> bool:
        report = await here.record(DRAINED + "frontend-1", DrainStatus)
        return report is not None and report.state == "done" and report.revision == wish.revision

    await until(done)
    report = await here.record(DRAINED + "frontend-1", DrainStatus)
    assert report.finished is None, "nobody counts a frontend's own requests"
    await here.store.delete(DRAINS + "frontend-1")
    await until(lambda: here.frontends.told == ["park 1", "unpark 1"])


async def test_a_bad_record_is_no_wish(scene):
    here = await scene(1)
    await here.store.put(DESIRED + "main", b"{}")
    await here.store.put(DESIRED + "main", msgspec.json.encode({"version": 9, "replicas": 7}))
    await put(here.store, DRAINS + "main-7", DrainSpec())
    await here.ward.settled(ready=1)
    assert await here.ids() == ["main-0"]


async def restarted(here: Scene, **wish: Any) -> RestartStatus:
    made = RestartSpec(**wish)
    await put(here.store, RESTART, made)

    async def over() -> bool:
        report = await here.record(RESTARTED, RestartStatus)
        return report is not None and report.revision == made.revision and report.state != "running"

    await until(over)
    report: RestartStatus = await here.record(RESTARTED, RestartStatus)
    return report


async def test_a_restart_starts_each_successor_before_its_forerunner_goes(scene):
    here = await scene(2)
    before = set((await here.ward.pids()).values())
    ready: list[int] = []

    async def watch() -> None:
        async for pools in here.fleet.driver.watch():
            ready.append(pools["main"].ready)

    watching = asyncio.create_task(watch())
    report = await restarted(here)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert (report.state, report.left, report.problem) == ("done", 0, None)
    assert report.done == ("main-0", "main-1", "frontend-0", "frontend-1")
    assert here.frontends.told == ["replace 0", "replace 1"]
    await here.ward.settled(ready=2)
    assert not before & set((await here.ward.pids()).values())
    assert min(ready) == 2, "there were always two that serve"
    told = here.ward.nurse.told
    assert told.index("came main-2") < told.index("leave main-0")


async def test_where_every_gpu_is_taken_the_forerunner_goes_first(scene):
    here = await scene(2, gpus=(0, 1), each=1)
    before = set((await here.ward.pids()).values())
    report = await restarted(here)
    assert report.state == "done"
    await here.ward.settled(ready=2)
    assert not before & set((await here.ward.pids()).values())
    told = here.ward.nurse.told
    assert told.index("gone main-0") < len(told) - 1 - told[::-1].index("came main-0")


async def test_the_last_engine_on_the_last_gpu_needs_force(scene):
    here = await scene(1, gpus=(0,), each=1)
    pids = await here.ward.pids()
    report = await restarted(here)
    assert report.state == "failed" and "--force" in str(report.problem)
    assert await here.ward.pids() == pids, "it goes on"
    report = await restarted(here, force=True)
    assert report.state == "done"
    await here.ward.settled(ready=1)
    assert await here.ward.pids() != pids


async def test_a_successor_that_does_not_start_ends_the_restart_and_nothing_else(scene):
    here = await scene(2)
    here.ward.nurse.refuse["main-2"] = 1000
    pids = await here.ward.pids()
    report = await restarted(here)
    assert report.state == "failed" and "main-2 does not start" in str(report.problem) and report.done == ()
    await here.ward.settled(ready=2)
    assert await here.ward.pids() == pids
    here.ward.nurse.refuse.clear()
    here.frontends.broken = True
    report = await restarted(here)
    assert report.state == "failed" and report.done == ("main-0", "main-1")


# --- before an engine may be ended ------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "LEFT_EVERY", 0.001)
    monkeypatch.setattr(membership_ack, "ACK_EVERY", 0.001)


class Drained:
    """A draining worker, what its frontends report, and what is counted."""

    def __init__(self) -> None:
        self.space = MemorySpace()
        self.store = MemoryStore(self.space)
        self.counts: list[RequestCount] = []
        self.card = card("w", epoch=3)
        self.task = asyncio.create_task(self.count())

    async def count(self) -> None:
        await asyncio.sleep(0)
        async for count in requests_left(reports_in(MemoryStore(self.space)), self.card):
            self.counts.append(count)

    async def frontend(self, name: str, active: int | None = None, begun: int = 0, epoch: int = 3) -> None:
        await self.store.put(FRONTENDS + name, b"{}")
        if active is not None:
            report = DrainAck(worker="w", epoch=epoch, active=active, begun=begun)
            await put(self.store, f"{LEAVING}w/{name}", report)


@pytest.fixture
async def draining(quick: None) -> AsyncIterator[Drained]:
    made = Drained()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_drain_is_over_when_every_frontend_has_said_so(draining):
    await draining.frontend("f0", active=2, begun=5)
    await draining.frontend("f1")
    await until(lambda: draining.counts)
    await draining.frontend("f0", active=0, begun=5)
    await until(lambda: draining.counts[-1].finished == 5)
    assert not draining.counts[-1].heard, "f1 has not heard of the drain yet: it may still send requests"
    await draining.frontend("f1", active=1, begun=1)
    await until(lambda: draining.counts[-1] == RequestCount(1, 5, True))
    await draining.frontend("f1", active=0, begun=1)
    await until(lambda: draining.counts[-1] == RequestCount(0, 6, True))


async def test_words_about_an_earlier_life_of_the_worker_do_not_count(draining):
    await draining.frontend("f0", active=0, epoch=2)
    await until(lambda: draining.counts and not draining.counts[-1].heard)
    await draining.frontend("f0", active=0, epoch=3)
    await until(lambda: draining.counts[-1] == RequestCount(0, 0, True))


async def test_without_frontends_nobody_sends_anything(draining):
    await until(lambda: draining.counts == [RequestCount(0, 0, True)])


async def test_an_outage_of_the_store_is_waited_out(draining):
    await draining.frontend("f0", active=1, begun=1)
    await until(lambda: draining.counts and draining.counts[-1].active == 1)
    draining.space.outage = "gone"
    before = list(draining.counts)
    await asyncio.sleep(0.02)
    assert draining.counts == before, "nothing is known of the frontends"
    draining.space.outage = None
    await draining.frontend("f0", active=0, begun=1)
    await until(lambda: draining.counts[-1] == RequestCount(0, 1, True))


async def test_a_frontend_counts_what_it_has_running_on_a_worker_that_leaves():
    world = RouterWorld(card("a"), card("b"))
    for number in range(6):
        world.post(arrived(f"r{number}"))
    on_a = sum(world.sent(f"r{n}").target.worker == "a" for n in range(6))
    assert running(world.router)["a"] == on_a > 0
    store = MemoryStore()
    departures = DrainProgress(store, world.router, "f0", ttl=10)
    departures.began(card("a"))

    async def said() -> DrainAck | None:
        raw = (await store.list(LEAVING)).get(f"{LEAVING}a/f0")
        return None if raw is None else decode(DrainAck, raw)

    await until(said)
    assert await said() == DrainAck(worker="a", epoch=1, active=on_a, begun=on_a)
    for request in list(world.router.requests.values()):
        if request.target is not None and request.target.worker == "a":
            world.router.requests.pop(request.id)

    async def idle() -> bool:
        report = await said()
        return report is not None and report.active == 0

    await until(idle)
    await departures.ended(card("a"))
    assert await store.list(LEAVING) == {}
    await departures.close()


async def test_a_worker_counts_as_known_once_every_frontend_knows_it(quick):
    space = MemorySpace()
    store = MemoryStore(space)
    for name in ("f0", "f1"):
        await store.put(FRONTENDS + name, b"{}")
    waiting = asyncio.create_task(acknowledged_by_all(acks_in(MemoryStore(space)), card("w", epoch=2)))
    await put(store, ACKS + "f0", MembershipAcks(workers={"w": 2}))
    await put(store, ACKS + "f1", MembershipAcks(workers={"w": 1}))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    cards = [card("w", epoch=2), card("x")]
    acquaintance = MembershipAck(MemoryStore(space), "f1", lambda: cards, ttl=10)
    running = asyncio.create_task(acquaintance.run())
    acquaintance.changed()
    async with asyncio.timeout(PATIENCE):
        await waiting
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- settings ---------------------------------------------------------------------------------------------------------


async def test_changed_knobs_count_in_every_process_all_that_came_at_once():
    space = MemorySpace()
    took: list[tuple[int, float, list[str], str]] = []

    def apply(settings: ClusterSettings, changes: Any, by: str) -> None:
        breaker = settings.router.breaker
        took.append((breaker.failures, breaker.open_for, sorted(change.key for change in changes), by))

    tuning = CurrentSettings(MemoryStore(space), ClusterSettings(), apply)
    store = MemoryStore(space)
    await store.put(SETTINGS + "router.breaker.open_for", msgspec.json.encode(SettingSpec(value="soon", by="x")))
    await store.put(SETTINGS + "router.mode", msgspec.json.encode(SettingSpec(value="random", by="x")))
    changes = [SettingChange("router.breaker.failures", 5, 7)]
    await desire_settings(store, changes, "key-1")
    task = asyncio.create_task(tuning.run())
    await until(lambda: took)
    assert tuning.read.is_set()
    assert took == [(7, 5.0, ["router.breaker.failures"], "key-1")], "what is wrong or not live is left out"
    await desire_settings(store, [SettingChange("router.breaker.open_for", 5.0, 9.0)], "key-2")
    await until(lambda: len(took) == 2)
    assert took[1] == (7, 9.0, ["router.breaker.open_for"], "key-2")
    await store.delete(SETTINGS + "router.breaker.failures")
    await until(lambda: len(took) == 3)
    assert took[2][:2] == (5, 9.0), "without the wish it is as it was at the start"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class CountedStore(MemoryStore):
    """A store that counts how many read it at the same time, and the bytes that are written."""

    def __init__(self, space: MemorySpace) -> None:
        super().__init__(space)
        self.reading = self.most = 0
        self.written: list[int] = []

    async def list(self, prefix: str) -> dict[str, bytes]:
        self.reading += 1
        self.most = max(self.most, self.reading)
        await asyncio.sleep(0)
        self.reading -= 1
        return await super().list(prefix)

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        self.written.append(len(value))
        await super().put(key, value, ttl=ttl)


async def test_many_who_wait_for_the_frontends_read_the_store_as_one(quick):
    space = MemorySpace()
    store, writer = CountedStore(space), MemoryStore(space)
    acks, reports = acks_in(store), reports_in(store)
    await writer.put(FRONTENDS + "f0", b"{}")
    cards = [card(f"w{number}", epoch=1) for number in range(400)]
    counts: dict[str, RequestCount] = {}

    async def drained(left):
        async for count in requests_left(reports, left):
            counts[left.id] = count
            if count.heard:
                return

    waiting = [asyncio.create_task(acknowledged_by_all(acks, each)) for each in cards]
    waiting += [asyncio.create_task(drained(each)) for each in cards]
    await until(lambda: len(counts) == len(cards))
    for each in cards:
        await put(writer, f"{LEAVING}{each.id}/f0", DrainAck(worker=each.id, epoch=1, active=0, begun=0))
    await put(writer, ACKS + "f0", MembershipAcks(workers=dict.fromkeys((each.id for each in cards), 1)))
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*waiting)
    assert store.most == 2, "one reads for all who wait for an acknowledgement, and one for all drains"
    await acks.close()
    await reports.close()


async def test_joins_of_one_moment_are_acknowledged_in_few_writes():
    space = MemorySpace()
    store = CountedStore(space)
    cards: list[Any] = []
    acquaintance = MembershipAck(store, "f1", lambda: cards, ttl=10)
    running = asyncio.create_task(acquaintance.run())
    for number in range(400):
        cards.append(card(f"w{number}", epoch=1))
        acquaintance.changed()
        await asyncio.sleep(0)
    await until(lambda: len(msgspec.json.decode(space.values[ACKS + "f1"])["workers"]) == 400)
    assert sum(store.written) < 3 * store.written[-1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_requests_are_counted_once_for_all_workers_that_drain(monkeypatch):
    counts = 0

    def counted(router):
        nonlocal counts
        counts += 1
        return running(router)

    monkeypatch.setattr(membership_ack, "running", counted)
    space = MemorySpace()
    departures = DrainProgress(MemoryStore(space), RouterWorld(card("a")).router, "f0", ttl=10)
    for number in range(200):
        departures.began(card(f"w{number}"))
    await until(lambda: len(space.values) == 200)
    assert counts < 50
    await departures.close()
