"""Controllers of the double: what they make of workloads while the test plays the kubelet."""

import time
from collections.abc import AsyncIterator
from copy import deepcopy

import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    RequestFailed,
    condition,
    leaving_first,
    matches,
    timestamp,
)
from tests.doubles.kubernetes.controllers.deployments import REVISION, share
from tests.doubles.kubernetes.controllers.pod_scheduler import NodeController, quantity, requests_of
from tests.kubernetes.cluster_world import ClusterWorld, cluster_world, template, workload


@pytest.fixture
async def world() -> AsyncIterator[ClusterWorld]:
    async with cluster_world() as made:
        yield made


def pod(name: str, **facts: object) -> JsonObject:
    """Return a running, ready pod, unless the facts say otherwise."""
    created = facts.get("created", "2026-01-01T00:00:00Z")
    notes = {"controller.kubernetes.io/pod-deletion-cost": facts["cost"]} if "cost" in facts else {}
    ready = {"type": "Ready", "status": str(facts.get("ready", True))}
    return {
        "metadata": {"name": name, "creationTimestamp": created, "annotations": notes},
        "spec": {"nodeName": facts.get("node", name)},
        "status": {"phase": facts.get("phase", "Running"), "conditions": [ready]},
    }


def test_the_order_of_a_scale_down() -> None:
    pods = [
        pod("old"),
        pod("young", created="2026-01-02T00:00:00Z"),
        pod("crowded-1", node="a"),
        pod("crowded-2", node="a"),
        pod("cheap", cost="-10"),
        pod("dear", cost="5", created="2026-01-03T00:00:00Z"),
        pod("unready", ready=False),
        pod("pending", phase="Pending", ready=False),
        pod("unassigned", node="", phase="Pending", ready=False),
    ]
    order = [each["metadata"]["name"] for each in leaving_first(pods, pods)]
    assert order == ["unassigned", "pending", "unready", "cheap", "crowded-1", "crowded-2", "young", "old", "dear"]


def test_shares_selectors_and_quantities() -> None:
    assert (share("25%", 5, up=True), share("25%", 5, up=False), share(3, 5, up=True)) == (2, 1, 3)
    selector: JsonObject = {"matchLabels": {"tier": "b"}}
    assert matches(selector, {"tier": "b"}) and not matches(selector, {"tier": "a"}) and not matches(None, {})
    assert (quantity("500m"), quantity("2Gi"), quantity("3"), quantity(2)) == (0.5, 2 * 2**30, 3.0, 2.0)
    asks = {"name": "a", "resources": {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}}
    assert requests_of({"spec": {"containers": [asks, asks]}}) == {"pods": 1, "cpu": 2.0, "nvidia.com/gpu": 4.0}


async def test_a_deployment_rolls_without_going_below_its_minimum(world: ClusterWorld) -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await world.create(workload("Deployment", "engine", 3, strategy=rolling))
    await world.until(lambda: len(world.pods()) == 3, "three pods")
    await world.pods_become_ready()
    await world.until(lambda: world.status("Deployment", "engine").get("availableReplicas") == 3, "all available")
    progress = condition(world.get("Deployment", "engine"), "Progressing")
    assert progress["reason"] == "NewReplicaSetAvailable"

    new = {"spec": {"template": template("engine:2", app="engine")}}
    await world.objects.merge(world.get("Deployment", "engine"), new)
    for left in (2, 1, 0):  # one more at a time, and an old one leaves only when the new one is ready
        await world.until(lambda: len(world.pods()) == 4, "one pod above the number")
        assert sum(_image(each) == "engine:1" for each in world.pods()) == left + 1
        await world.pods_become_ready()
        await world.until(lambda n=left: sum(_image(p) == "engine:1" for p in world.pods()) == n, "an old one leaves")
    await world.until(lambda: {_image(each) for each in world.pods()} == {"engine:2"}, "only new pods")
    deployment = world.get("Deployment", "engine")
    assert deployment["metadata"]["annotations"][REVISION] == "2"
    await world.until(
        lambda: world.status("Deployment", "engine").get("observedGeneration") == deployment["metadata"]["generation"],
        "observed",
    )


def _image(pod: JsonObject) -> str:
    return str(pod["spec"]["containers"][0]["image"])


@pytest.mark.slow
async def test_an_old_template_becomes_a_new_revision_of_the_same_replica_set(world: ClusterWorld) -> None:
    await world.create(workload("Deployment", "engine", 1))
    await world.until(lambda: len(world.objects.all("ReplicaSet")) == 1, "a ReplicaSet")
    first = deepcopy(world.get("Deployment", "engine")["spec"]["template"])
    await world.objects.merge(world.get("Deployment", "engine"), {"spec": {"template": template("engine:2")}})
    await world.until(lambda: len(world.objects.all("ReplicaSet")) == 2, "a second one")
    await world.objects.merge(world.get("Deployment", "engine"), {"spec": {"template": first}})
    await world.until(
        lambda: (
            sorted(each["metadata"]["annotations"][REVISION] for each in world.objects.all("ReplicaSet")) == ["2", "3"]
        ),
        "the first one is revision 3",
    )


@pytest.mark.slow
async def test_a_rollout_that_stands_still_exceeds_its_deadline(world: ClusterWorld) -> None:
    await world.create(workload("Deployment", "engine", 1, progressDeadlineSeconds=1))
    await world.until(
        lambda: condition(world.get("Deployment", "engine"), "Progressing").get("reason") == "ProgressDeadlineExceeded",
        "the deadline passes",
    )


@pytest.mark.slow
async def test_recreate_starts_new_pods_after_the_old_ones_left(world: ClusterWorld) -> None:
    await world.create(workload("Deployment", "engine", 2, strategy={"type": "Recreate"}))
    await world.until(lambda: len(world.pods()) == 2, "two pods")
    old = world.names()
    await world.objects.merge(world.get("Deployment", "engine"), {"spec": {"template": template("engine:2")}})
    seen: list[set[str]] = []

    def replaced() -> bool:
        seen.append({_image(each) for each in world.pods()})
        return len(world.pods()) == 2 and not set(old) & set(world.names())

    await world.until(replaced, "two new pods")
    assert {"engine:1", "engine:2"} not in seen


async def test_a_deployment_that_is_deleted_takes_its_pods_along(world: ClusterWorld) -> None:
    for name in ("background", "foreground"):
        await world.create(workload("Deployment", name, 1))
    await world.until(lambda: len(world.pods()) == 2, "two pods")
    for name in ("background", "foreground"):
        await world.objects.delete(world.get("Deployment", name), propagation=name.title())
    await world.until(lambda: not world.objects.all("Deployment"), "no Deployment")
    await world.until(lambda: not world.names() and not world.objects.all("ReplicaSet"), "nothing of them")


async def test_endpoints_are_the_ready_pods(world: ClusterWorld) -> None:
    ports = [{"containerPort": 8000, "name": "http"}]
    engine = template()
    engine["spec"]["containers"][0]["ports"] = ports
    await world.create(workload("ReplicaSet", "engine", 2, template=engine))
    spec = {"selector": {"app": "engine"}, "ports": [{"port": 80, "targetPort": "http"}]}
    await world.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "engine"}, "spec": spec})
    await world.until(lambda: len(world.pods()) == 2, "two pods")
    await world.set_pod(world.pods()[0], address="10.0.0.1")
    await world.set_pod(world.pods()[1], address="10.0.0.2", ready=False)

    def states() -> dict[str, bool]:
        slices = world.objects.all("EndpointSlice", "default")
        return {p["addresses"][0]: p["conditions"]["ready"] for each in slices for p in each.get("endpoints") or ()}

    await world.until(lambda: states() == {"10.0.0.1": True, "10.0.0.2": False}, "one of them is ready")
    made = world.objects.all("EndpointSlice", "default")[0]
    assert [port["port"] for port in made["ports"]] == [8000]
    await world.objects.delete(world.pods()[0])
    await world.until(lambda: "10.0.0.1" not in {a for a, ready in states().items() if ready}, "it gets no traffic")


def node(name: str, gpus: int) -> JsonObject:
    room = {"cpu": "8", "memory": "64Gi", "pods": "10", "nvidia.com/gpu": str(gpus)}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}, "status": {"allocatable": room}}


async def test_pods_get_nodes_with_room_and_the_rest_waits(world: ClusterWorld) -> None:
    for name in ("a", "b"):
        made = node(name, 2)
        made = await world.objects.create(made) or {}
        await world.objects.set_status(made, {"allocatable": node(name, 2)["status"]["allocatable"]})
    engine = template()
    engine["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    await world.create(workload("ReplicaSet", "engine", 3, template=engine))
    await world.until(lambda: sum(bool(p["spec"].get("nodeName")) for p in world.pods()) == 2, "two fit")
    assert {p["spec"].get("nodeName") for p in world.pods()} == {"a", "b", None}

    def waiting() -> JsonObject:
        return next((condition(p, "PodScheduled") for p in world.pods() if not p["spec"].get("nodeName")), {})

    await world.until(lambda: waiting().get("reason") == "Unschedulable", "the third says why")
    assert waiting()["message"] == "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def leader_worker_set(replicas: int, size: int) -> JsonObject:
    body = {"replicas": replicas, "leaderWorkerTemplate": {"size": size, "workerTemplate": template()}}
    kind = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
    return {**kind, "metadata": {"name": "tp"}, "spec": body}


@pytest.mark.slow
async def test_a_group_of_pods_has_a_leader_and_leaves_as_a_whole(world: ClusterWorld) -> None:
    await world.until(lambda: world.objects.serves("LeaderWorkerSet"), "the kind is served")
    await world.create(leader_worker_set(2, 2))
    await world.until(lambda: world.names() == ["tp-0", "tp-0-1", "tp-1", "tp-1-1"], "two groups of two")
    variables = {each["name"]: each["value"] for each in world.pods()[1]["spec"]["containers"][0]["env"]}
    assert variables["LWS_LEADER_ADDRESS"] == "tp-0.tp.default" and variables["LWS_WORKER_INDEX"] == "1"
    await world.pods_become_ready()
    await world.until(lambda: world.status("LeaderWorkerSet", "tp").get("readyReplicas") == 2, "both ready")
    await world.objects.merge(world.get("LeaderWorkerSet", "tp"), {"spec": {"replicas": 1}})
    await world.until(lambda: world.names() == ["tp-0", "tp-0-1"], "the last group left")


class UnreachableObjects:
    """One node whose heartbeat is old, and an API server that refuses every change."""

    def __init__(self) -> None:
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": timestamp(time.time() - 1000)}
        self.node = {"kind": "Node", "metadata": {"name": "n"}, "spec": {}, "status": {"conditions": [ready]}}

    def all(self, kind: str, namespace: str | None = None) -> list[JsonObject]:
        return [self.node] if kind == "Node" else []

    async def set_status(self, item: JsonObject, status: JsonObject) -> None:
        raise RequestFailed("PATCH: refused")


async def test_a_node_that_could_not_be_heard_during_an_outage_is_not_silent() -> None:
    controller, objects = NodeController(speed=10.0), UnreachableObjects()
    with pytest.raises(RequestFailed):
        await controller.reconcile(objects)  # type: ignore[arg-type]
    await controller.reconcile(objects)  # type: ignore[arg-type]  # it would refuse again


async def test_a_rollback_amid_a_rollout_keeps_the_pod_that_serves(world: ClusterWorld) -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    await world.create(workload("Deployment", "web", 1, strategy=rolling))
    await world.until(lambda: len(world.pods(app="web")) == 1, "a pod")
    await world.pods_become_ready()
    await world.until(lambda: world.status("Deployment", "web").get("availableReplicas") == 1, "it serves")
    (first,) = world.names(app="web")
    for image, pods in (("engine:2", 2), ("engine:1", 1)):
        await world.objects.merge(world.get("Deployment", "web"), {"spec": {"template": template(image, "web")}})
        await world.until(lambda n=pods: len(world.pods(app="web")) == n, f"{pods} pods")  # type: ignore[misc]
        assert first in world.names(app="web")
    await world.until(
        lambda: world.status("Deployment", "web").get("observedGeneration") == 3, "the controller has seen it"
    )
    assert world.names(app="web") == [first]
