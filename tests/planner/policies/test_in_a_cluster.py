"""Every classic policy with the machine, a router and engines: replicas follow a ramp, no request is lost."""

import math

import pytest

from penstock.engine.benchmark import perf_metrics
from penstock.engine.settings import SimSettings
from penstock.kernel.records import RequestRecord
from penstock.planner.counts import SloOf, SloPair
from penstock.planner.performance.sources import Known
from penstock.planner.planner import Planner
from penstock.planner.policies import Inputs, plugins_of
from penstock.planner.record import TickRecord
from penstock.planner.settings import BudgetSettings, PlannerSettings, SloTargets
from penstock.router.settings import RouterSettings
from penstock.simulate.cluster import Cluster
from penstock.simulate.plan import Plan, PoolPlan, StartUp
from penstock.traffic.request import TrafficRequest

ENGINE = SimSettings(kv_blocks=2000, max_seqs=32)
KNOWN = Known(metrics={"self-benchmark": perf_metrics(ENGINE)})
INPUTS = Inputs(known={"": {"prefill": KNOWN, "decode": KNOWN, "aggregated": KNOWN}})
SECONDS, CEILING = 300.0, 8
POLICIES = ["load-classic", "sla-classic", "throughput-fpm", "load-fpm", "load-fpm-1.6", "hybrid"]
QUICK = {("load-classic", "aggregated"), ("sla-classic", "disaggregated"), ("hybrid", "disaggregated")}
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


def run(policy: str, layout: str, target: str = "sla") -> tuple[list[RequestRecord], list[TickRecord]]:
    settings = PlannerSettings(
        policy=policy,
        optimization_target=target,
        slo=SloTargets(ttft=1.0, itl=0.02),
        budget=BudgetSettings(max_gpus=CEILING),
        throughput_interval=60.0,
        mode=layout,
    )
    records: list[RequestRecord] = []
    ticks: list[TickRecord] = []
    plan = Plan(
        model="m",
        router=RouterSettings(),
        pools={name: PoolPlan(sim=ENGINE, replicas=1, role=role) for name, role in LAYOUTS[layout].items()},
        until=SECONDS,
        start_up=StartUp(median=10.0),
        slo=SloOf(SloPair(1.0, 0.02)),
        drain_timeout=300.0,
    )
    planner = Planner(settings, plugins_of(settings, INPUTS), strict=True)
    Cluster(plan, ramp(), planner=planner, ticked=ticks.append, record=records.append).run()
    return records, ticks


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        pytest.param(policy, layout, marks=() if (policy, layout) in QUICK else pytest.mark.slow)
        for policy in POLICIES
        for layout in LAYOUTS
    ],
)
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
