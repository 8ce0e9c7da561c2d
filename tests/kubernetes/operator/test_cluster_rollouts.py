"""Are requests answered while pods are replaced on GPUs that are all taken, and does the status say what waits?"""

import signal

import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from tests.depth import deep
from tests.kubernetes.operator.operator_cluster import Load, OperatorCluster, spec

pytestmark = [pytest.mark.slow, pytest.mark.live]

ROLLOUTS = deep(10)
LIMIT: JsonObject = {"gpus": 2}
NODES: JsonObject = {}
"""The pods take all GPUs of the two nodes: only the scheduler knows that no more fit."""


def full(team: str, kubernetes: JsonObject, replicas: int = 2, **more: JsonObject) -> JsonObject:
    """Return a spec with one GPU, or one node, for each engine."""
    templates = {"main": {"metadata": {"labels": {"team": team}}}}
    made = spec(replicas, kubernetes={"podTemplates": templates, **kubernetes, **more})
    made["models"]["sim"]["pools"]["main"]["gpus"] = 1 if kubernetes else 8
    return made


def teams(cluster: OperatorCluster) -> list[str]:
    """Return whose template each pod has, sorted."""
    return sorted(pod["metadata"]["labels"].get("team", "") for pod in cluster.pods().values())


def rolled_out(cluster: OperatorCluster, team: str, replicas: int = 2) -> bool:
    return teams(cluster) == [team] * replicas and cluster.settled("demo", replicas)


@pytest.mark.parametrize("kubernetes", [LIMIT, NODES], ids=["limit", "nodes"])
def test_no_request_fails_in_rollouts_on_full_gpus(cluster: OperatorCluster, kubernetes: JsonObject) -> None:
    cluster.apply("demo", full("0", kubernetes))
    cluster.until(lambda: rolled_out(cluster, "0"), "engines with GPUs")
    with Load(cluster) as load:
        for number in range(1, ROLLOUTS + 1):
            load.goes_on()
            cluster.apply("demo", full(str(number), kubernetes))
            cluster.until(lambda n=number: rolled_out(cluster, str(n)), f"rollout {number}")
        load.goes_on()
    assert not load.failures
    status = cluster.penstock("status", "--cluster", "demo")
    assert all(at in status for at in cluster.addresses()), "frontends know each engine where it is"


def test_a_revert_amid_a_rollout_replaces_only_what_it_must(cluster: OperatorCluster) -> None:
    cluster.apply("demo", full("a", NODES))
    cluster.until(lambda: rolled_out(cluster, "a"), "engines with GPUs")
    with Load(cluster) as load:
        cluster.apply("demo", full("b", NODES))
        cluster.until(lambda: "b" in teams(cluster), "a pod of the newer template")
        there = {name for name, pod in cluster.pods().items() if pod["metadata"]["labels"]["team"] == "a"}
        cluster.apply("demo", full("a", NODES))
        cluster.until(lambda: rolled_out(cluster, "a"), "the former template")
        load.goes_on()
    assert not load.failures
    assert len(there - set(cluster.pods())) <= 1, "at most the one that was about to go"


def test_another_operator_amid_a_rollout_goes_on_with_it(cluster: OperatorCluster) -> None:
    cluster.apply("demo", full("a", LIMIT))
    cluster.until(lambda: rolled_out(cluster, "a"), "engines with GPUs")
    with Load(cluster) as load:
        cluster.apply("demo", full("b", LIMIT))
        cluster.until(lambda: "b" in teams(cluster), "a pod of the newer template")
        new = {name for name, pod in cluster.pods().items() if pod["metadata"]["labels"]["team"] == "b"}
        cluster.operators[-1].send_signal(signal.SIGKILL)
        cluster.operators.pop().wait()
        cluster.start_operator()
        cluster.until(lambda: rolled_out(cluster, "b"), "the newer template")
        load.goes_on()
    assert not load.failures and new <= set(cluster.pods()), "what was right stays"


def test_a_pool_that_goes_is_drained(cluster: OperatorCluster) -> None:
    two = spec(1)
    two["models"]["sim"]["pools"]["other"] = {"replicas": 1}
    cluster.apply("demo", two)
    cluster.until(lambda: cluster.ready("demo", 2) and len(cluster.pods()) == 2, "an engine of each pool")
    with Load(cluster) as load:
        load.goes_on()
        cluster.apply("demo", spec(1))
        cluster.until(lambda: list(cluster.pods()) and not any("other" in name for name in cluster.pods()), "one pool")
        load.goes_on()
    assert not load.failures
    cluster.until(lambda: "other-0" not in cluster.penstock("status", "--cluster", "demo"), "no entry is left of it")


@pytest.mark.parametrize("kubernetes", [{"gpus": 1}, NODES], ids=["limit", "nodes"])
def test_a_last_engine_waits_for_a_gpu_and_the_status_says_so(cluster: OperatorCluster, kubernetes: JsonObject) -> None:
    replicas = 1 if kubernetes else 2  # nodes: both are taken, by two pools of one engine each
    made = full("a", kubernetes, 1)
    changed = full("b", kubernetes, 1)
    if not kubernetes:
        for each in (made, changed):
            each["models"]["sim"]["pools"]["other"] = {"replicas": 1, "gpus": 8}
    made["kubernetes"]["strategy"] = {"main": {"maxUnavailable": 1}}
    cluster.apply("demo", made)
    there = ["a"] if kubernetes else ["", "a"]
    cluster.until(lambda: teams(cluster) == there and cluster.settled("demo", replicas), "its engines")
    before = set(cluster.pods())
    with Load(cluster) as load:
        cluster.apply("demo", changed)
        cluster.until(lambda: cluster.condition("demo", "UpToDate").get("status") == "False", "the condition")
        cluster.until(
            lambda: (
                "free" in cluster.condition("demo", "UpToDate")["message"]
                or "not scheduled" in cluster.condition("demo", "UpToDate")["message"]
            ),
            "what it waits for",
        )
        assert "1 of " in cluster.condition("demo", "UpToDate")["message"]
        assert before <= set(cluster.pods())
        load.goes_on()
        cluster.until(
            lambda: "pool main: 1 replica of an older spec" in cluster.penstock("status", "--cluster", "demo"),
            "its finding",
        )
    assert not load.failures
    changed["kubernetes"]["strategy"] = {"main": {"maxUnavailable": 1}}
    cluster.apply("demo", changed)
    cluster.until(lambda: "b" in teams(cluster) and cluster.settled("demo", replicas), "the newer template")
