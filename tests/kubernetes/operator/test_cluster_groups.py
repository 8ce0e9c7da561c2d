"""An engine over two pods: a LeaderWorkerSet that serves, dies as a whole, is adopted, and leaves nothing."""

from collections.abc import Iterator

import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from tests.kubernetes.operator.operator_cluster import OperatorCluster, spec

pytestmark = [pytest.mark.slow, pytest.mark.live]


def wide(replicas: int) -> JsonObject:
    made = spec(replicas, kubernetes={"hosts": {"main": 2}})
    made["supervise"] = {"drain_timeout": 2, "stop_grace": 1}
    return made


@pytest.fixture(scope="module")
def cluster(operated: OperatorCluster) -> Iterator[OperatorCluster]:
    operated.apply("wide", wide(1))
    operated.until(lambda: operated.ready("wide", 1), "an engine of two pods")
    yield operated
    operated.kubectl("delete", "penstock", "wide", "--ignore-not-found")


def groups(cluster: OperatorCluster) -> list[str]:
    listed = cluster.get("leaderworkersets", "-l", "app.kubernetes.io/instance=wide")["items"]
    return [each["metadata"]["name"] for each in listed if not each["metadata"].get("deletionTimestamp")]


def test_the_leader_answers_and_the_other_pod_is_part_of_the_engine(cluster: OperatorCluster) -> None:
    assert cluster.chat("wide")["usage"]["completion_tokens"] == 8
    (group,) = groups(cluster)
    assert set(cluster.pods(name="wide")) == {f"{group}-0", f"{group}-0-1"}
    assert cluster.status("wide")["ready"] == 1


def test_the_next_operator_adopts_the_whole_group(cluster: OperatorCluster) -> None:
    before = set(cluster.pods(name="wide"))
    cluster.stop_operator(cluster.operators[-1])
    cluster.start_operator()
    cluster.until(lambda: f"pod {groups(cluster)[0]}, was taken over" in cluster.log(), "the engine taken over")
    assert set(cluster.pods(name="wide")) == before and cluster.chat("wide")


def test_a_pod_that_fails_takes_the_group_with_it(cluster: OperatorCluster) -> None:
    (group,) = groups(cluster)
    cluster.kubectl("annotate", "pod", f"{group}-0-1", "testing.penstock.io/signal=KILL:1")
    cluster.until(lambda: groups(cluster) not in ([group], []) and cluster.ready("wide", 1), "another group")
    assert len(groups(cluster)) == 1 and len(cluster.pods(name="wide")) == 2
    assert f"lost its pod {group}-0-1" in cluster.log()
    assert cluster.chat("wide")


def test_nothing_is_left_of_a_group(cluster: OperatorCluster) -> None:
    cluster.kubectl("delete", "penstock", "wide")
    cluster.until(lambda: not groups(cluster) and not cluster.pods(name="wide"), "nothing left")
