"""Do the gauges say what evidence and plugins say, and nothing where these say nothing?"""

from typing import Any

import msgspec
import pytest

from penstock.adapters.telemetry.planner_estimate_metrics import PlannerEstimateMetrics
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.adapters.telemetry.prometheus_text import MetricRegistry
from penstock.planner.observation import ModelState, Observation
from penstock.planner.plugins.plugin_registry import FAILURES_MAX, OPEN_SECONDS, PluginSlot, PluginSpec
from penstock.planner.plugins.proposals import Override, PoolTarget
from tests.lab.report.planner_runs import tick
from tests.planner.pool_states import pool_state


def shown(metrics: PlannerEstimateMetrics, registry: MetricRegistry) -> dict[str, float]:
    lines = [line for line in registry.render().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
def registry() -> MetricRegistry:
    return MetricRegistry("p_")


def test_estimates_are_of_the_worst_engine_and_capacity_of_its_role(registry: MetricRegistry) -> None:
    metrics = PlannerEstimateMetrics(registry)
    estimates = [{"worker": "a", "ttft": 0.2, "itl": None}, {"worker": "b", "ttft": 0.5, "itl": 0.01}]
    evidence = {"load": {"decode": estimates}, "throughput": {"m": {"decode": {"capacity": {"rate": 4.5}}}}}
    metrics.ticked(tick(1, 5.0, 2, evidence=evidence))
    found = shown(metrics, registry)
    assert found['p_estimated_ttft_ms{model="m"}'] == 500.0
    assert found['p_estimated_itl_ms{model="m"}'] == 10.0
    assert found['p_engine_decode_capacity_requests_per_second{model="m"}'] == 4.5
    metrics.ticked(tick(2, 10.0, 2))
    assert not [name for name in shown(metrics, registry) if "estimated" in name or "capacity" in name]


@pytest.mark.parametrize(
    "evidence",
    ["x", {"decode": "x"}, {"decode": ["x", {"ttft": "fast"}]}, {"m": {"decode": {"capacity": {"rate": {}}}}}],
)
def test_evidence_of_any_kind_breaks_nothing(registry: MetricRegistry, evidence: Any) -> None:
    metrics = PlannerEstimateMetrics(registry)
    metrics.ticked(tick(1, 5.0, 2, evidence={"somebody's": evidence}))
    assert not [name for name in shown(metrics, registry) if "estimated" in name or "capacity" in name]


def test_power_is_of_what_should_be_and_unknown_where_a_replica_does_not_say(registry: MetricRegistry) -> None:
    metrics = PlannerEstimateMetrics(registry, watts=4000.0)
    pool = pool_state(role="decode", desired=2, ready=2, watts=700.0)
    seen = Observation(at=5.0, window=5.0, models={"m": ModelState(traffic=None, pools={"decode": pool})})
    metrics.saw(seen)
    metrics.ticked(tick(1, 5.0, 2, 4))
    found = shown(metrics, registry)
    assert (found["p_power_projected_watts"], found["p_power_budget_total_watts"]) == (2800.0, 4000.0)
    assert found["p_power_budget_utilization"] == 0.7
    other = PlannerEstimateMetrics(MetricRegistry("p_"))
    silent = {"decode": msgspec.structs.replace(pool, watts=None)}
    other.saw(msgspec.structs.replace(seen, models={"m": ModelState(traffic=None, pools=silent)}))
    other.ticked(tick(1, 5.0, 2, 4))
    assert other.power.get() == 0.0


def test_plugins_show_their_circuit_latency_and_what_is_held(registry: MetricRegistry) -> None:
    metrics = PlannerEstimateMetrics(registry)
    seat = PluginSlot(PluginSpec(id="cap", stage="constrain", hold="hold_last", outside=True), None, 0.0)
    seat.succeeded(10.0, Override(targets=(PoolTarget(pool="decode", replicas=2, kind="at_most"),)))
    seat.seconds = 0.25
    metrics.seats({"cap": seat}, 25.0, took=0.02)
    found = shown(metrics, registry)
    assert found['p_plugin_circuit_state{plugin="cap"}'] == 0.0
    assert found['p_plugin_latency_seconds{plugin="cap"}'] == 0.25
    assert found['p_plugin_cache_age_seconds{plugin="cap"}'] == 15.0
    assert found["p_tick_duration_seconds_count"] == 1.0
    for _ in range(FAILURES_MAX):
        seat.failed(26.0)
    metrics.seats({"cap": seat}, 27.0, took=0.02)
    assert metrics.circuit.get("cap") == 2.0
    metrics.seats({"cap": seat}, 26.0 + OPEN_SECONDS, took=0.02)
    assert metrics.circuit.get("cap") == 1.0
    metrics.seats({}, 60.0, took=0.02)
    assert not [name for name in shown(metrics, registry) if "cap" in name]


def test_desired_replicas_stay_in_view_while_the_cluster_is_looked_at() -> None:
    metrics = PlannerMetrics()
    metrics.wants([("m", "decode", 3)])
    metrics.saw(Observation(at=5.0, window=5.0, models={}))
    assert 'dynamo_planner_predicted_num_decode_replicas{model="m"} 3\n' in metrics.render()
