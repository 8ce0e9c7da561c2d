"""Trouble under load: an absent API server, lost history, another CRD, two operators, wrong clocks."""

import re
import signal
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lightkube")

from tests.kubernetes.operator.operator_cluster import CRDS, Load, OperatorCluster, spec

pytestmark = [pytest.mark.slow, pytest.mark.live]

OUTAGE = 12.0
"""Seconds: more than a leader acts without its Lease, and more than a worker's lease in the store lasts."""


def made_pods(cluster: OperatorCluster) -> list[str]:
    """Return the names of all pods that any operator has made."""
    return re.findall(r"pod (demo-main-[0-9-]+) was made", cluster.log())


def scale_by_spec(cluster: OperatorCluster, replicas: int) -> None:
    patch = f'{{"spec": {{"models": {{"sim": {{"pools": {{"main": {{"replicas": {replicas}}}}}}}}}}}}}'
    cluster.kubectl("patch", "penstock", "demo", "--type", "merge", "-p", patch)


def test_without_an_api_server_requests_are_answered_and_nothing_is_scaled(cluster: OperatorCluster) -> None:
    before, made = cluster.uids(), len(made_pods(cluster))
    with Load(cluster) as load:
        load.goes_on()
        led = cluster.log().count("leads")
        cluster.fault("refuse", seconds=OUTAGE)
        cluster.until(lambda: "can't be followed" in cluster.log(), "an operator that notices")
        load.goes_on()
        cluster.until(lambda: cluster.uids() == before, "the API server again")
        cluster.until(lambda: cluster.log().count("leads") > led, "an operator that leads again")
        scale_by_spec(cluster, 3)
        cluster.until(lambda: cluster.ready("demo", 3), "a third engine, as asked for after that")
    assert not load.failures
    assert before < cluster.uids() and len(made_pods(cluster)) == made + 1


def test_a_lost_history_of_changes_is_read_again(cluster: OperatorCluster) -> None:
    victim = next(iter(cluster.pods()))
    made = len(made_pods(cluster))
    with Load(cluster) as load:
        load.goes_on()
        for kind in ("drop-watch", "forget-history"):
            cluster.fault(kind, times=50)
        cluster.kubectl("delete", "pod", victim, "--wait=false")
        cluster.fault("forget-history")
        scale_by_spec(cluster, 3)
        cluster.until(lambda: cluster.ready("demo", 3) and victim not in cluster.pods(), "three engines")
    assert not load.failures
    assert len(cluster.pods()) == 3 and len(made_pods(cluster)) == made + 2


def test_a_newer_definition_of_the_resource_disturbs_nothing(cluster: OperatorCluster, tmp_path: Path) -> None:
    before = cluster.uids()
    kinds = [each for path in sorted(CRDS.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text()) if each]
    ours = next(each for each in kinds if each["spec"]["names"]["kind"] == "PenstockCluster")
    version = ours["spec"]["versions"][0]
    version["additionalPrinterColumns"].append(
        {"name": "Owner", "type": "string", "jsonPath": ".spec.kubernetes.owner"}
    )
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["kubernetes"]["properties"]["owner"] = {
        "type": "string",
        "default": "nobody",
    }
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(ours))
    with Load(cluster) as load:
        load.goes_on()
        cluster.kubectl("apply", "--server-side", "-f", str(tmp_path / "crd.yaml"))
        cluster.apply("demo", spec(2, kubernetes={"owner": "team-a"}))
        cluster.until(lambda: "team-a" in cluster.kubectl("get", "penstock", "demo"), "the newer column")
        scale_by_spec(cluster, 3)
        cluster.until(lambda: cluster.ready("demo", 3), "a third engine")
        cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
        load.goes_on()
    assert not load.failures and before < cluster.uids()
    assert cluster.condition("demo", "Degraded")["status"] == "False"


def test_of_two_operators_one_acts_and_a_silent_one_is_followed(cluster: OperatorCluster) -> None:
    before, made = cluster.uids(), len(made_pods(cluster))
    first, second = cluster.operators[-1], cluster.start_operator()
    with Load(cluster) as load:
        cluster.penstock("scale", "--cluster", "demo", "main=3")
        cluster.until(lambda: cluster.ready("demo", 3), "three engines")
        assert before < cluster.uids() and len(made_pods(cluster)) == made + 1
        first.send_signal(signal.SIGSTOP)  # it still believes that it leads
        scale_by_spec(cluster, 4)
        cluster.until(lambda: cluster.ready("demo", 4), "a fourth engine, by the other operator")
        first.send_signal(signal.SIGCONT)
        load.goes_on()
        cluster.stop_operator(first)
        cluster.until(lambda: cluster.ready("demo", 4), "four engines still")
    assert second.poll() is None and not load.failures
    new = made_pods(cluster)[made:]
    assert len(new) == 2 and new[0] != new[1], "no pod was made twice"
    assert before < cluster.uids()


def test_an_api_server_whose_clock_is_wrong_disturbs_nothing(cluster: OperatorCluster) -> None:
    before = cluster.uids()
    with Load(cluster) as load:
        cluster.fault("clock-skew", seconds=-3600)  # behind: in the double a node waits for what is made in its future
        try:
            scale_by_spec(cluster, 3)
            cluster.until(lambda: cluster.ready("demo", 3), "a third engine")
            cluster.stop_operator(cluster.operators[-1])
            cluster.start_operator()
            taken = cluster.log().count("was taken over")
            cluster.until(lambda: cluster.log().count("was taken over") >= taken + 3, "the engines taken over")
            load.goes_on()
        finally:
            cluster.fault("clock-skew", seconds=0)
    assert not load.failures and before < cluster.uids() and len(cluster.pods()) == 3
