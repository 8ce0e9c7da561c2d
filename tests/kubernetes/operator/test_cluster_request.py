"""A PenstockCluster that only says what it wants: planned for the nodes' GPUs, held back, started, kept."""

import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.planned_spec import PLAN_TIME
from tests.kubernetes.operator.operator_cluster import FAST, OperatorCluster

pytestmark = [pytest.mark.slow, pytest.mark.live]


def wish(ttft: float, **more: object) -> JsonObject:
    """Return a spec with Dynamo's own form of a request; its mocker stands for engines without GPUs."""
    asked = {"model": "Qwen/Qwen3-0.6B", "backend": "vllm", "sla": {"ttft": ttft, "itl": 20.0}, **more}
    asked |= {"features": {"mocker": {"enabled": True}}, "workload": {"isl": 500, "osl": 50, "requestRate": 1.0}}
    request = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeploymentRequest", "spec": asked}
    return {"request": request, "supervise": FAST, "planner": {"enabled": False}}


def test_a_request_is_planned_for_the_nodes_and_served(cluster: OperatorCluster) -> None:
    try:
        cluster.apply("wish", wish(0.001))
        cluster.until(
            lambda: "--ttft above" in str(cluster.condition("wish", "Degraded")), "why it can't be", patience=PLAN_TIME
        )
        cluster.apply("wish", wish(200.0, autoApply=False))
        cluster.until(
            lambda: "status.plan" in str(cluster.condition("wish", "Degraded")), "a plan held back", patience=PLAN_TIME
        )
        assert not cluster.pods(name="wish")
        held = cluster.status("wish")["plan"]
        cluster.apply("wish", wish(200.0))
        cluster.until(lambda: cluster.settled("wish", 1), "an engine that was planned")
        assert cluster.status("wish")["plan"] == held, "what is approved is what was seen"
        (model,) = held["config"]["models"].values()
        assert model["pools"]["main"]["sim"]["timing"]["gpu"] == "h100"
        before = cluster.pods(name="wish")
        cluster.operators[-1].kill()
        cluster.operators.pop().wait()
        cluster.start_operator()
        cluster.until(lambda: cluster.settled("wish", 1), "another operator")
        assert cluster.pods(name="wish").keys() == before.keys(), "a plan is made once"
    finally:
        cluster.kubectl("delete", "penstock", "wish", "--wait=false", "--ignore-not-found")
        cluster.until(lambda: not cluster.pods(name="wish"), "no pod is left")
