"""What a planner sees: every request once over all frontends and readings, replicas with ages, silence as silence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.adapters.sources.frontend_counters import (
    ClusterCounters,
    FrontendCounters,
    ModelCounters,
    RankCounters,
    WorkerCounters,
    since,
)
from penstock.adapters.sources.frontend_source import PATH, FrontendSource
from penstock.kernel.request_record import ItlSummary, RequestRecord
from penstock.kernel.values import EngineLimits, Pool, Replica, Slo, StartRecord, StepStats, Traffic
from penstock.planner.observation import PoolState
from penstock.runtime.cluster_state.desired_state import PoolStatus
from penstock.runtime.planning.counters_export import FrontendCounts
from penstock.runtime.planning.desired_state_connector import pool_of_status
from penstock.runtime.planning.live_observer import PoolObserver

SLO = Slo(ttft=0.5, itl=0.05)


def answered(isl: int = 100, osl: int = 10, ttft: float = 0.1, itl: float = 0.01, **more: Any) -> RequestRecord:
    gaps = ItlSummary(gaps=osl - 1, mean=itl)
    return RequestRecord(
        id="r", arrival=0.0, model="m", outcome="ok", isl=isl, osl=osl, ttft=ttft, itl=gaps, e2e=ttft + 1.0, **more
    )


def ended(outcome: Any, fault: Any = "engine") -> RequestRecord:
    return RequestRecord(id="r", arrival=0.0, model="m", outcome=outcome, fault=fault, isl=5)


# --- counting ---------------------------------------------------------------------------------------------------------


def test_demand_counts_at_arrival_and_all_the_rest_at_the_end():
    now = [10.0]
    counts = FrontendCounts(lambda: now[0])
    for isl in (100, 300):
        counts.of("m").arrive(isl)
    now[0] = 15.0
    told = counts.totals()["m"]
    assert (told.seconds, told.arrived, told.prompt_tokens, told.answered) == (5.0, 2, 400, 0)
    counts.of("m").end(answered(cached=25), SLO)
    counts.of("m").end(answered(ttft=0.9), SLO)
    told = counts.totals()["m"]
    assert (told.answered, told.output_tokens, told.judged, told.in_slo) == (2, 20, 2, 1)
    assert (told.cached_tokens, told.cache_reported_tokens) == (25, 100)  # one of them does not tell: that is not none
    assert told.ttft_mean == pytest.approx(0.5)
    assert sum(told.ttft.values()) == sum(told.shapes.values()) == sum(told.prompts.values()) == 2


@pytest.mark.parametrize(
    ("record", "lost", "judged"),
    [
        (ended("failed"), 1, 1),
        (ended("rejected", "overloaded"), 1, 1),
        (ended("expired", "deadline"), 1, 1),
        (ended("rejected", "client"), 0, 0),  # it asked for what can't be
        (ended("cancelled", "client"), 0, 0),
    ],
)
def test_whose_fault_it_was_says_whether_it_is_a_miss(record, lost, judged):
    counts = FrontendCounts(lambda: 0.0)
    counts.of("m").end(record, SLO)
    told = counts.totals()["m"]
    assert (told.lost, told.judged, told.in_slo) == (lost, judged, 0)


def test_what_was_told_is_not_changed_by_what_comes_after():
    counts = FrontendCounts(lambda: 0.0)
    counts.of("m").arrive(8)
    before = counts.totals()["m"]
    counts.of("m").arrive(8)
    assert since(counts.totals()["m"], before).prompts == before.prompts


# --- several frontends, asked over HTTP -------------------------------------------------------------------------------


class Frontends:
    """What the frontends of a cluster would tell, through one URL."""

    def __init__(self) -> None:
        self.told: dict[str, FrontendCounters] = {}
        self.missing: tuple[str, ...] = ()
        self.status = 200
        self.url = ""

    def count(self, name: str, *, arrived: int, seconds: float = 0.0, queued: int = 0, **more: Any) -> None:
        counts = Traffic(seconds=seconds, arrived=arrived, prompt_tokens=100 * arrived, prompts={5: arrived}, **more)
        old = self.told.get(name)
        engines = () if old is None else old.engines
        self.told[name] = FrontendCounters(
            name=name, models={"m": ModelCounters(counts=counts, queued=queued)}, engines=engines
        )

    def follow(self, name: str, *engines: WorkerCounters) -> None:
        self.told[name] = msgspec.structs.replace(self.told[name], engines=engines)

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["x-key"] == "let me in"
        told = ClusterCounters(frontends=tuple(self.told.values()), missing=self.missing)
        return web.Response(status=self.status, body=msgspec.json.encode(told), content_type="application/json")

    def source(self, **more: Any) -> FrontendSource:
        async def urls() -> list[str]:
            return ["http://127.0.0.1:1", self.url]  # the first one does not answer: the next one is asked

        return FrontendSource(urls, lambda url: {"x-key": "let me in"}, models=["m"], **more)


@asynccontextmanager
async def frontends() -> AsyncIterator[Frontends]:
    found = Frontends()
    app = web.Application()
    app.router.add_get(PATH, found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()


async def test_what_all_frontends_counted_since_the_reading_before_adds_up():
    async with frontends() as there:
        there.count("a", arrived=1000, seconds=500.0)
        there.count("b", arrived=70, seconds=500.0)
        mine = there.source()
        first = (await mine.read(100.0)).models["m"]
        assert (first.traffic.arrived, first.traffic.seconds, first.health) == (0, 0.0, "fresh")
        there.count("a", arrived=1010, seconds=505.0, queued=2)
        there.count("b", arrived=73, seconds=505.0, queued=1)
        found = (await mine.read(105.0)).models["m"]
        assert (found.traffic.arrived, found.traffic.prompt_tokens, found.traffic.seconds) == (13, 1300, 5.0)
        assert found.traffic.prompts == {5: 13}
        assert (found.queued, found.without_worker) == (3, 3)  # no worker of the model is ready
        await mine.close()


async def test_a_frontend_that_is_silent_makes_it_stale_then_broken_and_nothing_is_lost():
    async with frontends() as there:
        there.count("a", arrived=10)
        there.count("b", arrived=20)
        mine = there.source()
        await mine.read(100.0)
        there.count("a", arrived=15)
        silent = there.told.pop("b")
        there.missing = ("http://b",)
        found = (await mine.read(105.0)).models["m"]
        assert (found.traffic, found.health) == (None, "stale")
        assert "1 of 2 frontends did not answer: http://b" in found.why
        assert (await mine.read(170.0)).models["m"].health == "broken"
        there.told["b"], there.missing = silent, ()
        there.count("b", arrived=26)
        found = (await mine.read(175.0)).models["m"]
        assert (found.traffic.arrived, found.traffic.seconds, found.health) == (11, 75.0, "fresh")
        await mine.close()


@pytest.mark.parametrize("fault", ["status", "nobody"])
async def test_no_answer_is_no_traffic_that_could_be_read(fault):
    async with frontends() as there:
        there.count("a", arrived=10)
        mine = there.source()
        await mine.read(100.0)
        if fault == "status":
            there.status = 503
        else:
            there.url = "http://127.0.0.1:1"
        found = (await mine.read(105.0)).models["m"]
        assert (found.traffic, found.health) == (None, "stale")
        assert ("answers 503" if fault == "status" else "127.0.0.1:1") in found.why
        await mine.close()


async def test_a_frontend_that_is_new_counts_from_its_start_and_one_that_is_only_unknown_does_not():
    async with frontends() as there:
        there.count("a", arrived=10)
        mine = there.source()
        await mine.read(100.0)
        there.count("restarted", arrived=4, seconds=3.0)
        there.count("was away", arrived=900, seconds=800.0)
        assert (await mine.read(105.0)).models["m"].traffic.arrived == 4
        there.count("was away", arrived=905, seconds=805.0)
        assert (await mine.read(110.0)).models["m"].traffic.arrived == 5
        await mine.close()


async def test_a_planner_that_takes_over_counts_nothing_twice_and_leaves_nothing_out():
    async with frontends() as there:
        there.count("a", arrived=10)
        one = there.source()
        await one.read(100.0)
        there.count("a", arrived=17)
        state = one.snapshot()
        await one.close()
        other = there.source()
        other.restore(state)
        traffic = (await other.read(130.0)).models["m"].traffic
        assert (traffic.arrived, traffic.seconds) == (7, 30.0)
        await other.close()


async def test_readers_do_not_take_from_each_other():
    async with frontends() as there:
        there.count("a", arrived=10)
        one, other = there.source(), there.source()
        await asyncio.gather(one.read(100.0), other.read(100.0))
        there.count("a", arrived=15)
        for reader in (one, other):
            assert (await reader.read(105.0)).models["m"].traffic.arrived == 5
            await reader.close()


def engine(name: str, *, passes: int | None, epoch: int = 1, ready: bool = True) -> WorkerCounters:
    steps = None if passes is None else StepStats(passes=passes, wall=0.1 * passes, decode_seqs=8 * passes)
    ranks = (RankCounters(running=3, prefill_tokens=500, blocks=40),)
    return WorkerCounters(
        worker=name,
        epoch=epoch,
        model="m",
        role="aggregated",
        ready=ready,
        ranks=ranks,
        block_size=16,
        limits=EngineLimits(max_num_batched_tokens=None, max_num_seqs=2, kv_tokens=6400),
        steps=steps,
        window=steps,
    )


async def test_the_passes_of_an_engine_count_once_however_many_frontends_follow_it():
    async with frontends() as there:
        for name in ("a", "b"):
            there.count(name, arrived=0)
            there.follow(name, engine("w-0", passes=100))
        mine = there.source()
        await mine.read(100.0)
        for name in ("a", "b"):
            there.follow(name, engine("w-0", passes=130))
        reading = await mine.read(105.0)
        (seen,) = reading.workers["w-0"].engines
        assert (seen.steps.passes, seen.steps.decode_seqs) == (30, 240)
        assert seen.steps.prefill_tokens is None  # not told is not zero
        assert (seen.running, seen.waiting, seen.queued_prefill_tokens) == (2, 1, 500)
        assert (seen.decode_kv, seen.limits.kv_tokens) == (140, 6400)
        there.follow("a", engine("w-0", passes=7, epoch=2))
        there.follow("b", engine("w-0", passes=7, epoch=2))
        (seen,) = (await mine.read(110.0)).workers["w-0"].engines
        assert seen.steps.passes == 7  # it was started again
        await mine.close()


async def test_passes_come_from_a_frontend_that_follows_the_engine():
    async with frontends() as there:
        there.count("a", arrived=0)
        there.count("b", arrived=0)
        mine = there.source()
        await mine.read(100.0)
        there.follow("a", engine("w-0", passes=None))
        there.follow("b", engine("w-0", passes=9))
        (seen,) = (await mine.read(105.0)).workers["w-0"].engines
        assert seen.steps.passes == 9
        await mine.close()


# --- pools over time --------------------------------------------------------------------------------------------------


def pool(*replicas: tuple[str, str], desired: int = 2, **more: Any) -> dict[str, Pool]:
    found = tuple(Replica(id=name, state=state) for name, state in replicas)  # type: ignore[arg-type]
    return {"main": Pool(model="m", desired=desired, replicas=found, **more)}


def seen(pools: PoolObserver, at: float, found: dict[str, Pool]) -> PoolState:
    return pools.look(at, found, None)["m"]["main"]


def test_replicas_that_start_have_ages_and_those_that_came_tell_how_long_it_took():
    pools = PoolObserver()
    first = seen(pools, 0.0, pool(("a", "ready"), desired=1))
    assert (first.ready, first.starting, first.start_up_times, first.warm) == (1, (), (), False)
    pools.scaled(1.0, ["main"])
    assert seen(pools, 5.0, pool(("a", "ready"), ("b", "starting"))).starting == (4.0,)
    later = seen(pools, 10.0, pool(("a", "ready"), ("b", "starting"), ("c", "starting"), desired=3))
    assert later.starting == (9.0, 5.0)  # of c it is only known that it was not there at the look before
    came = seen(pools, 15.0, pool(("a", "ready"), ("b", "ready"), ("c", "starting"), desired=3))
    assert (came.start_up_times, came.starting, came.warm) == ((14.0,), (10.0,), True)
    assert seen(pools, 20.0, pool(("a", "ready"), ("b", "ready"), ("c", "starting"), desired=3)).start_up_times == ()


def test_a_start_that_the_fleet_recorded_counts_as_recorded_and_once():
    def look(at, *replicas):
        return pools.look(at, {"main": Pool(model="m", desired=2, replicas=replicas)}, None)["m"]["main"]

    def ready(id, seconds, woken=False, state="ready"):
        return Replica(id=id, state=state, start=StartRecord(seconds=seconds, phases={}, woken=woken))

    pools = PoolObserver()
    look(0.0, Replica(id="a", state="ready"))
    seen = look(30.0, Replica(id="a", state="ready"), ready("b", 12.5))
    assert (seen.start_up_times, seen.wake_times, seen.ready) == ((12.5,), (), 2)
    seen = look(60.0, Replica(id="a", state="ready"), ready("b", 12.5, state="draining"))
    assert look(90.0, Replica(id="a", state="ready"), ready("b", 12.5)).start_up_times == (), "it only drained"
    asleep = Replica(id="b", state="draining", asleep=True, host_memory=5)
    seen = look(120.0, Replica(id="a", state="ready"), asleep)
    assert (seen.asleep, seen.host_memory, seen.ready, seen.starting) == (1, 5, 1, ())
    seen = look(150.0, Replica(id="a", state="ready"), ready("b", 0.5, woken=True))
    assert (seen.start_up_times, seen.wake_times, seen.asleep, seen.host_memory) == ((), (0.5,), 0, 0)
    assert (
        look(180.0, Replica(id="a", state="ready"), Replica(id="b", state="draining", asleep=True)).host_memory is None
    )


def test_one_that_came_between_two_looks_counts_from_when_it_was_wanted():
    pools = PoolObserver()
    seen(pools, 0.0, pool(("a", "ready"), desired=1))
    pools.scaled(2.0, ["main"])
    assert seen(pools, 5.0, pool(("a", "ready"), ("b", "ready"))).start_up_times == (3.0,)


def test_what_does_not_start_keeps_its_age_and_says_why():
    pools = PoolObserver()
    seen(pools, 0.0, pool(("a", "starting")))
    replicas = (Replica(id="a", state="failed", reason="no memory"), Replica(id="b", state="draining"))
    found = {"main": Pool(model="m", desired=2, replicas=replicas)}
    look = seen(pools, 30.0, found)
    assert (look.failed, look.pool.problem, look.draining, look.starting) == (1, "no memory", 1, ())
    assert seen(pools, 60.0, pool(("a", "starting"))).starting == (60.0,)


def test_ages_outlive_the_planner():
    pools = PoolObserver()
    seen(pools, 0.0, pool(("a", "ready"), ("b", "starting")))
    other = PoolObserver()
    other.restore(pools.snapshot())
    assert seen(other, 40.0, pool(("a", "ready"), ("b", "starting"))).starting == (40.0,)


def test_servers_of_somebody_else_are_as_many_as_there_are():
    found = pool_of_status(PoolStatus(pool=pool(("a", "ready"))["main"], kind="urls"), None)
    assert seen(PoolObserver(), 0.0, {"main": found}).pool.limit == 2


def test_where_nobody_tells_of_replicas_the_connector_word_counts():
    found = {"decode": Pool(model="m", role="decode", desired=3, acknowledged=False)}
    pools = PoolObserver()
    assert pools.look(0.0, found, None)["m"]["decode"].starting == (0.0, 0.0, 0.0)
    found = {"decode": Pool(model="m", role="decode", desired=3, acknowledged=True)}
    assert pools.look(9.0, found, None)["m"]["decode"].ready == 3
