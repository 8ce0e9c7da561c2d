"""Does a simulated cluster do what a live one does, lose nothing, and come out the same each time?"""

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.simulation import Simulation
from penstock.kernel.values import Prompt, RequestId, WorkerId, plain
from penstock.planner.observation import Observation
from penstock.planner.planner import Planner
from penstock.planner.settings import PlannerSettings
from penstock.router.events import Decision
from penstock.router.settings import CostSettings, MigrationSettings, RouterSettings
from penstock.router.status import status_row
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import Fault, PoolPlan, SimulationPlan, StartUp
from penstock_lab.traffic.sessions import Sessions
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import workload
from tests.depth import deep
from tests.planner.driven import Says, wants

SIM = SimSettings(block_size=16, kv_blocks=2000, max_model_len=20_000, emit_decode_blocks=False)


def plan(**more: Any) -> SimulationPlan:
    fields: dict[str, Any] = {
        "model": "m",
        "pools": {"main": PoolPlan(sim=SIM, replicas=3)},
        "router": RouterSettings(),
        **more,
    }
    return SimulationPlan(**fields)


def chat(seconds: float, rate: float = 6.0, seed: int = 1) -> list[TrafficRequest]:
    out = []
    for request in workload("chat", rate, random.Random(seed)):
        if request.at >= seconds:
            return out
        out.append(request)
    return out


class Run:
    """One run, with everything that it told."""

    def __init__(self, plan: SimulationPlan, traffic: Iterable[TrafficRequest], policy: Any = None) -> None:
        self.records: list[RequestRecord] = []
        self.decisions: list[Decision] = []
        self.cluster = SimulatedCluster(
            plan, traffic, policy=policy, record=self.records.append, decided=self.decisions.append
        )
        self.cluster.run()

    def bytes(self) -> bytes:
        records = [msgspec.structs.replace(record, blocks=record.block_names) for record in self.records]
        return msgspec.json.encode([records, self.decisions], enc_hook=plain)

    def outcomes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for record in self.records:
            found[record.outcome] = found.get(record.outcome, 0) + 1
        return found


def test_every_request_ends_once_with_the_tokens_that_it_wanted() -> None:
    asked = chat(30)
    run = Run(plan(), asked)
    assert run.outcomes() == {"ok": len(asked)}
    assert sorted(record.id for record in run.records) == sorted(f"r{n}" for n in range(len(asked)))
    by_id = {record.id: record for record in run.records}
    for number, request in enumerate(asked):
        record = by_id[f"r{number}"]
        assert (record.isl, record.osl, record.osl_requested) == (request.isl, request.osl, request.osl)
        assert record.arrival == pytest.approx(request.at, abs=1e-9)
        assert record.ttft is not None and record.e2e is not None and 0 < record.ttft <= record.e2e
    assert len(run.decisions) == len(asked)


def test_what_a_request_takes_besides_counts_to_its_first_token_and_to_no_other() -> None:
    requests = [TrafficRequest(at=2.0 * number, isl=256, osl=8, hash_ids=[], block_size=16) for number in range(6)]
    late = msgspec.structs.replace(SIM, request_overhead=0.2)
    made = [Run(plan(pools={"main": PoolPlan(sim=sim, replicas=1)}), requests).records for sim in (SIM, late)]
    for soon, slow in zip(*made, strict=True):
        assert soon.ttft is not None and slow.ttft == pytest.approx(soon.ttft + 0.2)
        assert soon.tpot is not None and slow.tpot == pytest.approx(soon.tpot)


def test_the_same_seed_gives_the_same_bytes_and_another_one_other_decisions() -> None:
    asked = chat(20)
    tied = RouterSettings(mode="random")
    one, again, other = (Run(plan(router=tied, seed=seed), asked).bytes() for seed in (1, 1, 2))
    assert one == again != other


def test_round_robin_is_the_engines_alone() -> None:
    """With round robin the router changes nothing: the same as handing requests to the engines in turn."""
    asked = [request for request in chat(20) if request.osl > 1]
    run = Run(plan(router=RouterSettings(mode="round_robin")), asked)
    done: dict[str, EngineFinished] = {}

    def world(now: int, sender: str, effect: object) -> tuple[()]:
        if isinstance(effect, EngineFinished):
            done[effect.id] = effect
        return ()

    engines = Simulation({f"e{n}": Engine(SIM) for n in range(3)}, world)
    for record in sorted(run.records, key=lambda record: int(record.id[1:])):
        number = int(record.id[1:])
        request = asked[number]
        worker = (record.worker or "").rpartition("-")[2]
        submit = SubmitRequest(
            id=RequestId(record.id), prompt=Prompt(request.isl, record.block_names), max_tokens=request.osl
        )
        engines.post(round(request.at * SECOND), f"e{worker}", submit)
    engines.run()
    turns = [int((r.worker or "").rpartition("-")[2]) for r in sorted(run.records, key=lambda r: int(r.id[1:]))]
    assert all((after - before) % 3 == 1 for before, after in pairwise(turns))
    for record in run.records:
        told = done[record.id]
        assert record.ttft == pytest.approx(((told.first or 0) - told.arrived) / SECOND, abs=1e-9)
        assert record.e2e == pytest.approx((told.at - told.arrived) / SECOND, abs=1e-9)
        assert record.cached == told.cached


def test_the_router_knows_what_the_caches_hold() -> None:
    run = Run(plan(router=RouterSettings(mode="kv")), chat(40))
    told = [r for r in run.records if r.expected_cached is not None and r.cached is not None]
    assert sum(r.cached or 0 for r in told) > 0
    # Between the decision and its first pass a cache changes a little; without the index nothing would agree.
    close = sum(abs((r.cached or 0) - (r.expected_cached or 0)) <= 2 * SIM.block_size for r in told)
    assert close / len(told) > 0.8


def test_figures_over_time_are_those_of_the_status() -> None:
    compared = []

    def observe(at: float, row: Any) -> None:
        compared.append(row)
        assert row == status_row(cluster.router.status(cluster.simulation.now))

    cluster = SimulatedCluster(plan(observe_every=0.5), chat(20), observe=observe)
    cluster.run()
    assert len(compared) > 40 and any(row["active_blocks"] for row in compared)


def test_kv_routing_hits_more_than_round_robin() -> None:
    def hits(mode: str) -> float:
        roomy = {"main": PoolPlan(sim=msgspec.structs.replace(SIM, kv_blocks=20_000), replicas=3)}
        run = Run(plan(router=RouterSettings(mode=mode), pools=roomy), chat(120))  # type: ignore[arg-type]
        return sum(r.cached or 0 for r in run.records) / sum(r.isl or 0 for r in run.records)

    assert hits("kv") > hits("round_robin") + 0.05


def test_a_latency_cost_knows_the_speed_that_the_engine_measured() -> None:
    router = RouterSettings(cost=CostSettings(kind="latency"))
    run = Run(plan(router=router), chat(10))
    assert {cost.unit for decision in run.decisions for cost in decision.candidates} == {"ms"}
    assert all(worker.speed is not None for worker in run.cluster.router.roster.workers.values())


def test_the_per_token_gaps_are_those_of_the_requests() -> None:
    run = Run(plan(), chat(30))
    assert run.cluster.world.preemptions, "those count as well"
    pairs = run.cluster.gaps()
    assert sum(count for _, count in pairs) == sum(record.osl - 1 for record in run.records)
    mean = sum(gap * count for gap, count in pairs) / sum(count for _, count in pairs)
    whole = sum((r.itl.mean * r.itl.gaps) for r in run.records if r.itl is not None)
    assert mean == pytest.approx(whole / sum(r.itl.gaps for r in run.records if r.itl is not None), rel=0.006)


# --- what befalls workers --------------------------------------------------------------------------------------------


def test_a_worker_that_fails_takes_its_streams_elsewhere_and_comes_back() -> None:
    asked = chat(30)
    fault = Fault(at=12.0, kind="fail", worker=WorkerId("main-1"), restart=2.0)
    run = Run(plan(faults=[fault], start_up=StartUp(median=3.0)), asked)
    assert run.outcomes() == {"ok": len(asked)}
    moved = [record for record in run.records if len(record.legs) > 1]
    assert moved and all(record.osl == record.osl_requested for record in moved)
    assert all(record.legs[0].worker == "main-1" and record.legs[-1].worker != "main-1" for record in moved)
    assert run.cluster.world.notes["migrated"] > 0
    idle = [leg for record in run.records for leg in record.legs if leg.worker == "main-1"]
    assert not [leg for leg in idle if 12.0 < leg.dispatched < 17.0]
    assert [leg for leg in idle if leg.dispatched >= 17.0], "2 s until it is started again, 3 s until it serves"


def test_without_migration_a_broken_stream_fails_and_is_counted() -> None:
    fault = Fault(at=12.0, kind="fail", worker=WorkerId("main-1"), restart=None)
    router = RouterSettings(migration=MigrationSettings(limit=0))
    run = Run(plan(faults=[fault], router=router), chat(20))
    assert run.outcomes()["failed"] > 0
    assert "main-1" not in run.cluster.fleet.workers


def test_a_drained_worker_finishes_what_it_has() -> None:
    run = Run(plan(faults=[Fault(at=10.0, kind="drain", worker=WorkerId("main-0"))]), chat(30))
    assert set(run.outcomes()) == {"ok"} and not [r for r in run.records if len(r.legs) > 1]
    legs = [leg for record in run.records for leg in record.legs if leg.worker == "main-0"]
    assert legs and max(leg.dispatched for leg in legs) <= 10.0
    life = run.cluster.fleet.lives[0]
    assert life.ended is not None and life.ended / SECOND == pytest.approx(max(leg.last or 0 for leg in legs))


def test_a_drain_that_takes_too_long_hands_its_requests_on() -> None:
    slow = msgspec.structs.replace(SIM, timing=TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 100.0)))
    long = [TrafficRequest(at=n * 0.1, isl=100, osl=400) for n in range(9)]
    run = Run(
        plan(
            pools={"main": PoolPlan(sim=slow, replicas=3)},
            faults=[Fault(at=5.0, kind="drain", worker=WorkerId("main-0"))],
            drain_timeout=3.0,
        ),
        long,
    )
    assert run.outcomes() == {"ok": 9}
    moved = [record for record in run.records if len(record.legs) > 1]
    assert len(moved) == 3 and all(record.legs[0].last == pytest.approx(8.0) for record in moved)


def test_workers_are_paid_for_from_start_to_end() -> None:
    faults = [
        Fault(at=3600.0, kind="add", pool="main"),
        Fault(at=1800.0, kind="fail", worker=WorkerId("main-0"), restart=None),
    ]
    run = Run(plan(faults=faults, until=7200.0, start_up=StartUp(median=60.0)), chat(20))
    assert run.cluster.gpu_hours() == pytest.approx(0.5 + 2 + 2 + 1, abs=0.001)


def test_a_worker_that_crashes_again_and_again_is_started_ever_later() -> None:
    faults = [Fault(at=at, kind="fail", worker=WorkerId("main-0")) for at in (10.0, 12.0, 15.0)]
    run = Run(plan(faults=faults), chat(40))
    lives = [life for life in run.cluster.fleet.lives if life.worker == "main-0"]
    assert [life.started / SECOND for life in lives] == [0.0, 10.5, 13.0, 17.0]
    assert set(run.outcomes()) == {"ok"}


def test_a_drain_that_is_undone_brings_the_worker_back() -> None:
    faults = [
        Fault(at=10.0, kind="drain", worker=WorkerId("main-0")),
        Fault(at=40.0, kind="undrain", worker=WorkerId("main-0")),
    ]
    run = Run(plan(faults=faults), chat(60))
    sent = [leg.dispatched for record in run.records for leg in record.legs if leg.worker == "main-0"]
    assert not [at for at in sent if 10.0 < at < 40.0] and [at for at in sent if at > 40.0]
    assert set(run.outcomes()) == {"ok"}


def test_a_rolling_restart_replaces_every_worker_and_fails_no_request() -> None:
    run = Run(plan(faults=[Fault(at=10.0, kind="restart")], start_up=StartUp(median=3.0)), chat(200))
    assert set(run.outcomes()) == {"ok"} and not [record for record in run.records if len(record.legs) > 1]
    lives = run.cluster.fleet.lives
    # Each successor runs first, so that the first of them has a new name, and gives it back in the end.
    assert [life.worker for life in lives] == [*(f"main-{n}" for n in (0, 1, 2)), *(f"main-{n}" for n in (3, 0, 1, 2))]
    at = sorted({life.started for life in lives} | {life.ended for life in lives if life.ended is not None})
    serving = [sum((life.ready or 0) <= t and (life.ended is None or life.ended > t) for life in lives) for t in at]
    assert min(serving) >= 3, "there were always three that serve"
    assert run.cluster.supervisor.state.restart is None


def test_a_flip_takes_the_same_worker_as_a_live_one_would() -> None:
    pools = {"main": PoolPlan(sim=SIM, replicas=3), "other": PoolPlan(sim=SIM, replicas=2, role="decode")}
    fault = Fault(at=10.0, kind="flip", worker=WorkerId("other-1"), role="aggregated")
    run = Run(plan(pools=pools, faults=[fault]), chat(30))
    assert run.cluster.supervisor.pools()["other"].replicas[1].role == "aggregated"
    assert [leg for record in run.records for leg in record.legs if leg.worker == "other-1"]


def test_operations_that_can_not_be_done_are_told() -> None:
    run = Run(plan(faults=[Fault(at=1.0, kind="fail", worker=WorkerId("main-9"))]), chat(5))
    assert run.cluster.refused == ["fail of main-9 at 1 s: workers then are main-0, main-1, main-2"]


def test_a_cordoned_worker_gets_nothing_until_it_is_put_back() -> None:
    faults = [
        Fault(at=5.0, kind="cordon", worker=WorkerId("main-2")),
        Fault(at=15.0, kind="uncordon", worker=WorkerId("main-2")),
    ]
    run = Run(plan(faults=faults), chat(30))
    sent = [leg.dispatched for record in run.records for leg in record.legs if leg.worker == "main-2"]
    assert not [at for at in sent if 5.0 < at < 15.0] and [at for at in sent if at > 15.0]


@settings(max_examples=deep(15), deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_goes_missing_whatever_befalls(seed: int) -> None:
    rng = random.Random(seed)
    faults = [
        Fault(
            at=rng.uniform(0, 12),
            kind=rng.choice(("fail", "fail", "drain", "add", "cordon")),
            worker=WorkerId(f"main-{rng.randrange(4)}"),
            pool="main",
            restart=rng.choice((None, 0.0, 3.0)),
        )
        for _ in range(rng.randrange(8))
    ]
    small = msgspec.structs.replace(SIM, kv_blocks=rng.choice((400, 2000)), max_num_seqs=rng.choice((4, 256)))
    asked = [request for request in chat(8, seed=seed) if request.isl + request.osl < 6000]
    run = Run(
        plan(
            pools={"main": PoolPlan(sim=small, replicas=3)},
            router=RouterSettings(mode=rng.choice(("kv", "round_robin", "power_of_two")), request_timeout=120.0),
            faults=faults,
            start_up=StartUp(median=rng.choice((0.0, 2.0)), sigma=rng.choice((0.0, 0.5))),
            drain_timeout=rng.choice((0.5, 60.0)),
            seed=seed,
            checked=True,
        ),
        asked,
    )  # `Cluster.run` holds the books against each other
    assert len(run.records) == len(asked)
    for record in run.records:
        assert record.outcome != "ok" or record.osl == record.osl_requested


# --- sessions and scaling --------------------------------------------------------------------------------------------


def test_closed_loop_sessions_wait_for_their_answers() -> None:
    slow = msgspec.structs.replace(SIM, timing=TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 200.0)))
    asked = chat(30)
    run = Run(plan(pools={"main": PoolPlan(sim=slow, replicas=3)}), Sessions(asked))
    assert len(run.records) == len(asked)
    ended: dict[str, float] = {}
    think = {(one.session, one.turn): one.think for one in asked}
    for record in sorted(run.records, key=lambda record: record.arrival):
        assert record.session is not None and record.turn is not None and record.e2e is not None
        if record.session in ended:
            pause = think[record.session, record.turn]
            assert record.arrival == pytest.approx(ended[record.session] + (pause or 0.0), abs=1e-6)
        ended[record.session] = record.arrival + record.e2e


class ScheduledSteps:
    """So many workers of a pool from a given second on."""

    def __init__(self, pool: str, steps: Mapping[float, int]) -> None:
        self._pool = pool
        self._steps = sorted(steps.items())

    def decide(self, observation: Observation) -> Mapping[str, int] | None:
        due = [count for at, count in self._steps if at <= observation.at]
        return {self._pool: due[-1]} if due else None


def test_a_policy_is_told_what_happened_and_gets_what_it_asks_for() -> None:
    seen: list[Observation] = []

    class Policy(ScheduledSteps):
        def decide(self, seen_now: Observation) -> Mapping[str, int] | None:
            seen.append(seen_now)
            return super().decide(seen_now)

    asked = chat(60)
    policy = Policy("main", {20.0: 5, 40.0: 1})
    run = Run(plan(policy_interval=10.0, start_up=StartUp(median=5.0), until=60.0), asked, policy)
    models = [one.models["m"] for one in seen]
    assert [one.at for one in seen][:6] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert sum(one.traffic.arrived for one in models) == len(asked)
    assert sum(one.traffic.answered for one in models) <= len(run.records) == len(asked)
    ready = [one.pools["main"].ready for one in models[:6]]
    assert ready[:3] == [3, 3, 5] and ready[4] < 5 and models[5].pools["main"].ready == 1
    assert set(run.outcomes()) == {"ok"}
    drained = [life for life in run.cluster.fleet.lives if life.why == "it was drained"]
    assert len(drained) == 4 and {life.worker for life in drained} == {f"main-{n}" for n in (1, 2, 3, 4)}


def test_a_replica_sleeps_without_gpus_and_wakes_sooner_than_another_one_starts() -> None:
    came: list[tuple[tuple[float, ...], tuple[float, ...], int]] = []
    wanted = {0.0: 3, 20.0: 1, 60.0: 3}

    def decide(seen: Observation) -> dict[str, int]:
        state = seen.models["m"].pools["main"]
        came.append((state.start_up_times, state.wake_times, state.asleep))
        return {"main": [count for at, count in wanted.items() if seen.at >= at][-1]}

    sim = msgspec.structs.replace(SIM, wake_time=2.0)
    pools = {"main": PoolPlan(sim=sim, replicas=3, sleeping=1)}
    shape = plan(pools=pools, policy_interval=5.0, start_up=StartUp(median=15.0), until=120.0)
    run = Run(shape, chat(100, rate=1.0), SimpleNamespace(decide=decide))
    assert set(run.outcomes()) == {"ok"}
    assert max(asleep for *_, asleep in came) == 1
    assert [time for _, wakes, _ in came for time in wakes] == [2.0]
    assert [time for starts, *_ in came for time in starts] == [15.0]
    lives = [life for life in run.cluster.fleet.lives if life.woken or life.why == "it sleeps"]
    asleep, woken = lives
    assert asleep.worker == woken.worker and woken.started == 60 * SECOND
    assert run.cluster.asleep_hours() * 3600 == pytest.approx((woken.started - (asleep.ended or 0)) / SECOND)


@pytest.mark.parametrize("shares", [False, True])
def test_weights_from_a_sibling_make_the_starts_shorter_that_the_planner_measures(shares: bool) -> None:
    """A pool that begins empty: its first replica reads its files, and the others take its weights where they may."""
    sim = msgspec.structs.replace(SIM, load_time=60.0, sibling_load_time=8.0)
    pools = {"main": PoolPlan(sim=sim, replicas=1, share_weights=shares)}
    believed: list[tuple[float, float, int]] = []

    def target(context: Any) -> Any:
        state = context.observation.models["m"].pools["main"]
        usual = context.start_ups.quantile("m", state, 0.5)
        believed.append((context.observation.at, usual, context.start_ups.measured("m", state)))
        return wants(main=1 if context.observation.at < 100 else 2 if context.observation.at < 200 else 4)

    faults = [Fault(at=10.0, kind="fail", worker="main-0", restart=1.0)]
    planner = Planner(PlannerSettings(tick=5.0), [Says("p", target)], strict=True)
    shape = plan(pools=pools, until=400.0, faults=faults)
    SimulatedCluster(shape, chat(380, rate=0.2), planner=planner).run()
    started = planner.memory.start_ups.times
    ((_, times),) = started.items()
    assert times[-3:] == ([8.0] * 3 if shares else [60.0] * 3)
    usual = [usual for at, usual, measured in believed if at > 300 and measured >= 3]
    assert usual and set(usual) == ({8.0} if shares else {60.0})
    assert believed[0][1:] == (PlannerSettings().start.assumed, 0)


@pytest.mark.parametrize("who", ["planner", "policy"])
@pytest.mark.parametrize("start_up", [0.0, 5.0, 10.0, 12.0, 20.0])
def test_whoever_becomes_ready_at_the_instant_of_a_look_belongs_to_one_look(start_up: float, who: str) -> None:
    came: list[float] = []

    def target(seen: Observation) -> dict[str, int]:
        came.extend(seen.models["m"].pools["main"].start_up_times)
        return {"main": 5 if seen.at >= 20.0 else 3}

    shape = plan(policy_interval=5.0, start_up=StartUp(median=start_up), until=60.0)
    if who == "policy":
        SimulatedCluster(shape, chat(50, rate=1.0), policy=SimpleNamespace(decide=target)).run()
    else:
        says = Says("p", lambda context: wants(**target(context.observation)))
        SimulatedCluster(
            shape, chat(50, rate=1.0), planner=Planner(PlannerSettings(tick=5.0), [says], strict=True)
        ).run()
    assert came == [start_up] * 2


def test_a_policy_that_asks_for_the_impossible_is_told_of_and_changes_nothing() -> None:
    run = Run(plan(policy_interval=10.0), chat(15), ScheduledSteps("other", {0.0: 3}))
    assert run.cluster.refused and "other" in run.cluster.refused[0]
    assert len(run.cluster.fleet.lives) == 3


# --- what can't be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pools": {}}, "no pool"),
        (
            {
                "pools": {
                    "a": PoolPlan(sim=SIM, replicas=1),
                    "b": PoolPlan(sim=msgspec.structs.replace(SIM, block_size=32), replicas=1),
                }
            },
            "a 16, b 32",
        ),
        ({"faults": [Fault(at=-1.0, kind="add")]}, r"faults\[0\].at is -1"),
        ({"faults": [Fault(at=1.0, kind="add", pool="x")]}, r"faults\[0\].pool is 'x'"),
        ({"faults": [Fault(at=1.0, kind="fail")]}, r"faults\[0\].worker is missing"),
    ],
)
def test_a_plan_that_can_not_be_says_why(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SimulatedCluster(plan(**change), [])
