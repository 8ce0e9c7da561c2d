"""Every classic policy with the machine, a router and engines: replicas follow a ramp, no request is lost."""

import math

import msgspec
import pytest

from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import Slo
from penstock.planner.observation import Observation
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock.planner.tick_record import TickRecord
from penstock.router.settings import RouterSettings
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.engine.settings import SimSettings
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan, StartUp
from penstock_lab.traffic.traffic_request import TrafficRequest

ENGINE = SimSettings(kv_blocks=2000, max_num_seqs=32)
KNOWN = KnownSpeeds(metrics={"self-benchmark": perf_metrics(ENGINE)})
SLO = Slo(ttft=1.0, itl=0.02)
INPUTS = PolicyInputs(slo=SLO, speeds={"": {"prefill": KNOWN, "decode": KNOWN, "aggregated": KNOWN}})
SECONDS, CEILING = 300.0, 8
FLOOD, FLOODED = 120.0, 2
POLICIES = ["load-classic", "sla-classic", "throughput-fpm", "load-fpm", "load-fpm-1.6", "hybrid"]
QUICK = {
    *(("slo", layout) for layout in ("aggregated", "disaggregated")),
    *(("load-classic", "aggregated"), ("sla-classic", "disaggregated"), ("hybrid", "disaggregated")),
}
"""Each takes seconds, so the others are among the slow ones."""
LAYOUTS = {"aggregated": {"main": "aggregated"}, "disaggregated": {"prefill": "prefill", "decode": "decode"}}


def ramp() -> list[TrafficRequest]:
    """Return arrivals at 1 request per second that grow to 14 and go back."""
    found, at = [], 0.0
    while True:
        at += 1.0 / (1.0 + 13.0 * math.sin(math.pi * at / SECONDS))
        if at >= SECONDS - 20.0:
            return found
        found.append(TrafficRequest(at=at, isl=2000, osl=150))


def flood() -> list[TrafficRequest]:
    """Return two minutes of several times what `FLOODED` GPUs serve, and then little: two requests a second."""
    busy = [TrafficRequest(at=place / 30.0, isl=2000, osl=150) for place in range(int(30 * FLOOD))]
    return busy + [TrafficRequest(at=FLOOD + place / 2.0, isl=2000, osl=150) for place in range(300)]


def run(
    policy: str,
    layout: str,
    target: str = "sla",
    *,
    requests: list[TrafficRequest] | None = None,
    ceiling: int = CEILING,
    timeout: float = 600.0,
    told: bool = True,
) -> tuple[list[RequestRecord], list[TickRecord]]:
    """Return what became of requests, and the planner's ticks.

    Args:
        told: whether engines tell how fast they are: what they measured of themselves, and their passes.
    """
    settings = PlannerSettings(
        policy=policy,
        optimization_target=target,
        budget=BudgetSettings(max_gpus=ceiling),
        throughput_interval=60.0,
        mode=layout,
    )
    records: list[RequestRecord] = []
    ticks: list[TickRecord] = []
    plan = SimulationPlan(
        model="m",
        router=RouterSettings(request_timeout=timeout),
        pools={name: PoolPlan(sim=ENGINE, replicas=1, role=role) for name, role in LAYOUTS[layout].items()},
        until=SECONDS,
        start_up=StartUp(median=10.0),
        slo=SLO,
        drain_timeout=300.0,
    )
    planner = Planner(settings, plugins_of(settings, INPUTS if told else PolicyInputs(slo=SLO)), strict=True)
    cluster = SimulatedCluster(
        plan, ramp() if requests is None else requests, planner=planner, ticked=ticks.append, record=records.append
    )
    if not told:
        assert cluster.observer is not None
        look = cluster.observer.look
        cluster.observer.look = lambda *args: without_passes(look(*args))  # type: ignore[method-assign]
    cluster.run()
    return records, ticks


def without_passes(seen: Observation) -> Observation:
    """Return what would be seen of engines that tell nothing of their passes."""
    replace = msgspec.structs.replace
    models = {}
    for name, model in seen.models.items():
        pools = {
            each: replace(pool, engines=tuple(replace(engine, steps=None) for engine in pool.engines))
            for each, pool in model.pools.items()
        }
        models[name] = replace(model, pools=pools)
    return replace(seen, models=models)


@pytest.mark.parametrize("layout", ["aggregated", pytest.param("disaggregated", marks=pytest.mark.slow)])
def test_speeds_are_learnt_from_answers_alone_where_engines_tell_nothing(layout):
    """Two GPUs to begin with would not do for the ramp's top, and what is learnt is nearly as good as being told."""
    records, ticks = run("slo", layout, told=False)
    assert {record.outcome for record in records} == {"ok"} and len(records) == len(ramp())
    sources = {source for tick in ticks for source in tick.evidence.get("slo_propose", {}).get("speed", {}).values()}
    assert sources and all(source.startswith("answers") for source in sources)
    informed, _ = run("slo", layout)
    kept, best = (sum(one.within(SLO) for one in each) for each in (records, informed))
    assert kept >= 0.75 * best
    top = max(sum(pool.target for pool in tick.pools.values()) for tick in ticks)
    assert len(LAYOUTS[layout]) < top <= CEILING
    assert sum(pool.target for pool in ticks[-1].pools.values()) < top


def in_each_layout(*policies: str) -> pytest.MarkDecorator:
    """Parametrize by policy and layout; those that are not `QUICK` are slow."""
    return pytest.mark.parametrize(
        ("policy", "layout"),
        [
            pytest.param(policy, layout, marks=() if (policy, layout) in QUICK else pytest.mark.slow)
            for policy in policies
            for layout in LAYOUTS
        ],
    )


@in_each_layout(*POLICIES)
def test_replicas_follow_a_ramp_within_the_ceiling_and_no_request_is_lost(policy, layout):
    records, ticks = run(policy, layout)
    assert len(records) == len(ramp())
    assert {record.outcome for record in records} == {"ok"}
    gpus = [sum(pool.target * pool.gpus for pool in tick.pools.values()) for tick in ticks]
    assert max(gpus) <= CEILING
    said = [because.code for tick in ticks for because in tick.chosen]
    if policy == "sla-classic" and layout == "aggregated":
        assert set(said) == {"disabled"}
        return
    assert max(gpus) > len(LAYOUTS[layout]), f"it never grew: {sorted(set(said))}"
    assert all(pool.target >= 1 for tick in ticks for pool in tick.pools.values())


@pytest.mark.parametrize("target", ["throughput", "latency"])
def test_thresholds_do_too(target):
    records, ticks = run("slo", "aggregated", target)
    assert {record.outcome for record in records} == {"ok"} and len(records) == len(ramp())
    assert 1 < max(tick.pools["main"].target for tick in ticks) <= CEILING
    assert {tick.policy for tick in ticks} == {f"thresholds-{target}"}


@in_each_layout("slo", *POLICIES)
def test_above_the_ceiling_nothing_breaks_and_service_is_back_after_it(policy, layout):
    """Requests run into their deadline in queues, in prefills and in hand-offs; the books hold all the same."""
    sent = flood()
    records, ticks = run(policy, layout, requests=sent, ceiling=FLOODED, timeout=20.0)
    assert len(records) == len(sent)
    assert {record.outcome for record in records} == {"ok", "expired"}, "it is no flood otherwise"
    gpus = {tick.at: sum(pool.target * pool.gpus for pool in tick.pools.values()) for tick in ticks}
    assert max(gpus.values()) <= FLOODED
    if policy == "slo":
        full = min(at for at, count in gpus.items() if count == FLOODED)
        assert full < 60.0 and {count for at, count in gpus.items() if full <= at < FLOOD} == {FLOODED}
        assert [because.code for tick in ticks if full < tick.at < FLOOD for because in tick.bound].count("ceiling") > 5
    after = [record for record in records if record.arrival > FLOOD + 60.0]
    assert sum(record.within(SLO) for record in after) >= 0.95 * len(after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_ends_in_an_overload_leaves_nothing_behind(layout):
    """Prefills of requests that have expired are not cut; a simulation waits for them before it compares its books."""
    sent = [one for one in flood() if one.at < FLOOD]
    records, _ = run("slo", layout, requests=sent, ceiling=FLOODED, timeout=20.0)
    assert len(records) == len(sent) and records[-1].outcome == "expired"
