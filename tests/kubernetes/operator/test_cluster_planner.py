"""The planner's Deployment: it scales engines, tells its reasons, and respects a number set by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from tests.kubernetes.operator.operator_cluster import Load, OperatorCluster, spec

pytestmark = [pytest.mark.slow, pytest.mark.live]


def planned(least: int) -> JsonObject:
    planner = {
        "enabled": True,
        "policy": "static",
        "load_interval": "1s",
        "throughput_interval": "2s",
        "budget": {"min_replicas": least, "max_gpus": 8},
    }
    made = spec(1, planner=planner, slo={"ttft": "20s", "itl": "10s"})
    made["models"]["sim"]["pools"]["main"]["sim"] = {"timing": {"speed_up": 5}}
    return made


@pytest.fixture(scope="module")
def cluster(operated: OperatorCluster) -> Iterator[OperatorCluster]:
    """A cluster "planned" whose planner wants two engines where the spec has one."""
    operated.apply("planned", planned(2))
    operated.until(lambda: operated.ready("planned", 2), "the second engine, by the planner")
    yield operated
    operated.kubectl("delete", "penstock", "planned", "--ignore-not-found")


def test_the_reason_of_the_planner_is_told_everywhere(cluster: OperatorCluster) -> None:
    (row,) = cluster.status("planned")["pools"]
    assert row["configured"] == 1 and row["reason"].startswith("by the planner: main")
    why = row["reason"].removeprefix("by the planner: ")
    assert why in cluster.penstock("explain", "scale", "--cluster", "planned")
    messages = [event["message"] for event in cluster.get("events")["items"] if event["reason"] == "Scaled"]
    assert any(why in message for message in messages)


def test_a_context_of_the_kubeconfig_leads_to_the_reason(cluster: OperatorCluster, tmp_path: Path) -> None:
    """Through a port-forward of the command's own; the current context is another cluster, which is gone."""
    contexts = cluster.kubeconfig_with_contexts(tmp_path / "contexts")
    (row,) = cluster.status("planned")["pools"]
    why = row["reason"].removeprefix("by the planner: ")
    named = ("--context", "dev", "--namespace", "default", "--cluster", "planned")
    assert why in cluster.penstock("explain", "scale", *named, kubeconfig=contexts)
    assert "main-1" in cluster.penstock("status", *named, kubeconfig=contexts)
    elsewhere = cluster.penstock_ended("explain", "scale", "--cluster", "planned", kubeconfig=contexts)
    assert elsewhere.returncode != 0 and "the API server can't be reached" in elsewhere.stderr
    both = cluster.penstock_ended("explain", "scale", "--context", "dev", kubeconfig=contexts)
    assert both.returncode != 0 and "there is demo, planned" in both.stderr


def test_attainment_is_shown_by_kubectl(cluster: OperatorCluster) -> None:
    with Load(cluster, "planned") as load:
        load.goes_on()
        cluster.until(lambda: "100.0%" in cluster.kubectl("get", "penstock", "planned"), "attainment")
    assert not load.failures


def test_a_number_set_by_hand_is_left_alone_and_that_is_told(cluster: OperatorCluster) -> None:
    patch = '{"spec": {"models": {"sim": {"pools": {"main": {"replicas": 3}}}}}}'
    cluster.kubectl("patch", "penstock", "planned", "--type", "merge", "-p", patch)
    cluster.until(lambda: cluster.ready("planned", 3), "three engines")
    told = "an operator set main from 2 to 3; that is left alone for 600 s"
    cluster.until(lambda: told in cluster.penstock("explain", "scale", "--cluster", "planned"), "the planner's word")
    (row,) = cluster.status("planned")["pools"]
    assert (row["replicas"], row["reason"]) == (3, "by PenstockCluster")


def test_a_role_changes_without_another_pod(cluster: OperatorCluster) -> None:
    before = set(cluster.pods(name="planned"))
    with Load(cluster, "planned") as load:
        assert "prefill now" in cluster.penstock("flip", "--cluster", "planned", "main-1", "prefill")
        load.goes_on()
        assert "aggregated now" in cluster.penstock("flip", "--cluster", "planned", "main-1", "--undo")
    assert not load.failures and set(cluster.pods(name="planned")) == before


def test_nothing_is_left_of_a_deleted_cluster(cluster: OperatorCluster) -> None:
    cluster.kubectl("delete", "penstock", "planned")
    kinds = "pods,services,deployments,replicasets,configmaps,secrets,serviceaccounts,roles,rolebindings,pdb"
    ours = "app.kubernetes.io/instance=planned"
    cluster.until(lambda: not cluster.get(f"{kinds},penstockentries", "-l", ours)["items"], "nothing left")
    cluster.until(lambda: not cluster.get("leases", "-l", ours)["items"], "no lease left")
