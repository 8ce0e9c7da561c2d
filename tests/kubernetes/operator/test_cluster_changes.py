"""The operator end to end: kubectl applies a PenstockCluster, pods run as processes, and requests are answered."""

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from tests.kubernetes.operator.operator_cluster import Load, OperatorCluster, spec

pytestmark = [pytest.mark.slow, pytest.mark.live]

RESOURCE = "/apis/penstock.io/v1alpha1/namespaces/default/penstockclusters"


def replaced(cluster: OperatorCluster, victim: str) -> bool:
    """Return whether another pod serves: the status alone may be a second old."""
    pods = cluster.pods()
    ready = [condition_of(pod) for pod in pods.values()]
    return victim not in pods and ready == ["True", "True"] and cluster.ready("demo", 2)


def condition_of(pod: JsonObject) -> str:
    conditions = pod.get("status", {}).get("conditions") or []
    return next((str(each["status"]) for each in conditions if each["type"] == "Ready"), "False")


def test_a_request_is_answered_through_the_service(cluster: OperatorCluster) -> None:
    assert cluster.chat("demo")["usage"]["completion_tokens"] == 8
    shown = cluster.kubectl("get", "penstock").splitlines()
    assert shown[0].split() == ["NAME", "REPLICAS", "READY", "ATTAINMENT", "GPUS", "AVAILABLE", "AGE"]
    assert shown[1].split()[:4] == ["demo", "2", "2", "0"]


def test_status_comes_through_a_port_forward(cluster: OperatorCluster) -> None:
    assert all(at in cluster.penstock("status", "--cluster", "demo") for at in cluster.addresses())


def test_a_context_alone_means_the_only_cluster_of_its_namespace(cluster: OperatorCluster, tmp_path: Path) -> None:
    contexts = cluster.kubeconfig_with_contexts(tmp_path / "contexts")
    text = cluster.penstock("status", "--context", "dev", kubeconfig=contexts)
    assert all(at in text for at in cluster.addresses())
    elsewhere = cluster.penstock_ended("status", "--context", "gone", kubeconfig=contexts)
    assert elsewhere.returncode != 0 and "the API server can't be reached" in elsewhere.stderr
    unknown = cluster.penstock_ended("status", "--context", "prod", kubeconfig=contexts)
    assert unknown.returncode != 0 and "prod" in unknown.stderr and "kubectl config get-contexts" in unknown.stderr


def test_scaling_works_through_the_admin_routes_with_its_reason(cluster: OperatorCluster) -> None:
    assert "3 of 3 ready" in cluster.penstock("scale", "--cluster", "demo", "main=3")
    cluster.until(lambda: cluster.ready("demo", 3), "three engines")
    assert "2 of 2 ready" in cluster.penstock("scale", "--cluster", "demo", "main=2")
    cluster.until(lambda: len(cluster.pods()) == 2, "two pods")
    messages = [event["message"] for event in cluster.get("events")["items"] if event["reason"] == "Scaled"]
    assert any(message.startswith("pool main: 2 -> 3 replicas: by ") for message in messages)


def test_a_number_that_somebody_patches_counts(cluster: OperatorCluster) -> None:
    patch = '{"spec": {"models": {"sim": {"pools": {"main": {"replicas": 1}}}}}}'
    cluster.kubectl("patch", "penstock", "demo", "--type", "merge", "-p", patch)
    cluster.until(lambda: cluster.ready("demo", 1), "one engine")
    (row,) = cluster.status("demo")["pools"]
    assert (row["configured"], row["replicas"], row["reason"]) == (1, 1, "by PenstockCluster")


def test_a_live_knob_changes_nothing_that_runs(cluster: OperatorCluster) -> None:
    before = set(cluster.pods())
    cluster.apply("demo", spec(2, frontend={"limits": {"rate": 1000}}))
    cluster.until(lambda: "frontend.limits.rate: None -> 1000" in cluster.log(), "the changed knob")
    assert set(cluster.pods()) == before


def test_no_request_fails_while_a_pod_is_killed(cluster: OperatorCluster) -> None:
    victim = next(iter(cluster.pods()))
    with Load(cluster) as load:
        load.goes_on()
        cluster.kubectl("annotate", "pod", victim, "testing.penstock.io/signal=KILL:1")
        cluster.until(lambda: replaced(cluster, victim), "a pod in its place")
    assert not load.failures
    cluster.until(
        lambda: any("ended with status" in event["message"] for event in cluster.get("events")["items"]), "its reason"
    )


def test_no_request_fails_while_a_pod_is_deleted_by_hand(cluster: OperatorCluster) -> None:
    victim = next(iter(cluster.pods()))
    with Load(cluster) as load:
        load.goes_on()
        cluster.kubectl("delete", "pod", victim, "--wait=false")
        cluster.until(lambda: replaced(cluster, victim), "a pod in its place")
    assert not load.failures


def test_a_killed_operator_disturbs_nothing_and_the_next_one_adopts(cluster: OperatorCluster) -> None:
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods().items()}
    cluster.operators[-1].send_signal(signal.SIGKILL)
    cluster.operators.pop().wait()
    with Load(cluster) as load:
        load.goes_on()
        cluster.start_operator()
        cluster.until(lambda: cluster.log().count("was taken over") >= 2, "the engines taken over")
        load.goes_on()
    assert not load.failures
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods().items()} == before


def test_another_template_replaces_one_pod_after_the_other(cluster: OperatorCluster) -> None:
    before = set(cluster.pods())
    templates = {"main": {"metadata": {"labels": {"team": "a"}}}}
    with Load(cluster) as load:
        load.goes_on()
        cluster.apply("demo", spec(2, kubernetes={"podTemplates": templates}))
        cluster.until(lambda: not before & set(cluster.pods()) and cluster.ready("demo", 2), "other pods")
    assert not load.failures
    assert all(pod["metadata"]["labels"]["team"] == "a" for pod in cluster.pods().values())


def test_restart_replaces_engines_and_frontends(cluster: OperatorCluster) -> None:
    before = set(cluster.pods()) | set(cluster.pods("frontend"))
    with Load(cluster) as load:
        load.goes_on()
        cluster.penstock("restart", "--cluster", "demo", "--no-wait")
        cluster.until(
            lambda: not before & (set(cluster.pods()) | set(cluster.pods("frontend"))) and cluster.ready("demo", 2),
            "other pods",
        )
    assert not load.failures


def test_a_spec_that_contradicts_itself_is_said_and_changes_nothing(cluster: OperatorCluster) -> None:
    before = set(cluster.pods())
    wrong = spec(2)
    wrong["models"]["sim"]["pools"]["other"] = {"replicas": 1, "block_size": 32, "sim": {"block_size": 32}}
    cluster.apply("demo", wrong)
    cluster.until(lambda: cluster.condition("demo", "Degraded").get("reason") == "SpecRefused", "the condition")
    assert "block" in cluster.condition("demo", "Degraded")["message"]
    assert set(cluster.pods()) == before and cluster.chat("demo")
    cluster.apply("demo", spec(2))
    cluster.until(lambda: cluster.condition("demo", "Degraded").get("status") == "False", "no trouble")


def test_a_wrong_spec_is_refused_at_admission(cluster: OperatorCluster) -> None:
    patch = '{"spec": {"models": {"sim": {"pools": {"main": {"replicas": 0}}}}}}'
    with pytest.raises(AssertionError, match="replicas"):
        cluster.kubectl("patch", "penstock", "demo", "--type", "merge", "-p", patch)


def test_kubectl_scale_counts_engines(cluster: OperatorCluster) -> None:
    before = set(cluster.pods())
    cluster.kubectl("patch", "penstock", "demo", "--type", "merge", "-p", '{"spec": {"replicas": 2}}')
    cluster.kubectl("scale", "penstock", "demo", "--replicas", "3")
    cluster.until(lambda: cluster.ready("demo", 3), "three engines")
    assert before < set(cluster.pods())
    scale = json.loads(cluster.kubectl("get", "--raw", f"{RESOURCE}/demo/scale"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
    assert len(cluster.get("pods", "-l", scale["status"]["selector"])["items"]) == 3
    cluster.kubectl("patch", "penstock", "demo", "--type", "merge", "-p", '{"spec": {"replicas": null}}')


def test_the_number_of_frontends_is_that_of_the_spec(cluster: OperatorCluster) -> None:
    cluster.apply("demo", spec(2, frontend={"processes": 2}))
    cluster.until(lambda: len(cluster.pods("frontend")) == 2 and cluster.status("demo")["frontends"] == 2, "frontends")
