"""Scaling over an API server: each kind of object, its pods, writers besides us, missing rights, an outage."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lightkube import AsyncClient, KubeConfig
from lightkube.resources.core_v1 import Pod
from lightkube.resources.rbac_authorization_v1 import Role, RoleBinding
from lightkube.types import PatchType

from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.values import Pool
from penstock.planner.plugins.proposals import Reason
from penstock_kubernetes.connector.api_access import DELETION_COST, ApiAccess
from penstock_kubernetes.connector.graph_deployment import GraphDeployment
from penstock_kubernetes.connector.kubernetes_connector import KubernetesConnector
from penstock_kubernetes.connector.own_cluster import OwnCluster
from penstock_kubernetes.connector.scaled_object import ScaledObject
from tests.doubles.kubernetes.api.api_faults import ApiFault
from tests.doubles.kubernetes.api.api_server import ApiServer
from tests.kubernetes.connector.cluster_objects import (
    ADAPTERS,
    CRASHING,
    GRAPHS,
    LWS_GROUP,
    NVIDIA,
    OWN_GROUP,
    PENDING,
    READY,
    Deployment,
    StatefulSet,
    component_beta,
    container,
    define,
    graph_alpha,
    graph_beta,
    pod,
    put,
    service_alpha,
    workload,
)

WHY = (Reason(code="test", text="a test wants it"),)
GRAPH, ADAPTER = "DynamoGraphDeployment", "DynamoGraphDeploymentScalingAdapter"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer(tmp_path) as server:
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(config=KubeConfig.from_file(server.kubeconfig).get()) as client:
        yield client


def pool(role: str = "aggregated", **fields: Any) -> Pool:
    return Pool(**{"model": "m", "role": role, "desired": 1, **fields})


def connector(client: AsyncClient, *targets: Any, **more: Any) -> KubernetesConnector:
    return KubernetesConnector(targets, ApiAccess(client), namespace="default", **more)


def deployment(client: AsyncClient, name: str = "decode", kind: str = "Deployment") -> ScaledObject:
    return ScaledObject(client, kind, name, pool=name, configured=pool())


async def replicas(client: AsyncClient, resource: Any, name: str) -> Any:
    return (await client.get(resource, name)).to_dict()["spec"].get("replicas")


async def place(client: AsyncClient, name: str, labels: dict[str, str], status: dict[str, Any]) -> None:
    """Create a pod, and write its status as a kubelet would."""
    await client.create(pod(name, labels))
    await client.patch(Pod.Status, name, {"status": status})


# --- Deployments, StatefulSets, LeaderWorkerSets ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "resource"), [("Deployment", Deployment), ("StatefulSet", StatefulSet)])
async def test_a_workload_is_scaled_by_its_scale_subresource(client: AsyncClient, kind: str, resource: Any) -> None:
    await client.create(workload(resource, "decode", 2, gpus=4))
    scaling = connector(client, deployment(client, kind=kind))
    found = (await scaling.look())["decode"]
    assert (found.desired, found.gpus, found.replicas) == (2, 4, ())
    assert await scaling.scale({"decode": 5}, (), WHY) == {}
    assert await replicas(client, resource, "decode") == 5


async def test_a_group_of_pods_is_one_replica_with_the_gpus_of_all(client: AsyncClient) -> None:
    await define(client, LWS_GROUP, "LeaderWorkerSet", "leaderworkersets", "v1", scale=True)
    group = {
        "size": 3,
        "leaderTemplate": {"spec": {"containers": [container(2)]}},
        "workerTemplate": {"spec": {"containers": [container(8)]}},
    }
    spec = {"replicas": 1, "leaderWorkerTemplate": group}
    resource = await put(client, LWS_GROUP, "v1", "LeaderWorkerSet", "leaderworkersets", "decode", spec=spec)
    for number in range(3):
        labels = {
            "leaderworkerset.sigs.k8s.io/name": "decode",
            "leaderworkerset.sigs.k8s.io/worker-index": str(number),
        }
        await place(client, f"decode-0-{number}", labels, READY)
    scaling = connector(client, deployment(client, kind="LeaderWorkerSet"))
    found = (await scaling.look())["decode"]
    assert found.gpus == 2 + 2 * 8
    assert found.ids == ["decode-0-0"]
    assert await scaling.scale({"decode": 2}, (), WHY) == {}
    assert await replicas(client, resource, "decode") == 2


async def test_pods_are_replicas_with_the_reason_for_which_they_do_not_serve(client: AsyncClient) -> None:
    await client.create(workload(Deployment, "decode", 4))
    labels = {"app": "decode"}
    await place(client, "serves", {**labels, "penstock.io/worker": "vllm-1"}, READY)
    await place(client, "no-node", labels, PENDING)
    await place(client, "crashes", labels, CRASHING)
    await place(client, "loads", labels, {"phase": "Running"})
    await place(client, "of-another", {"app": "else"}, READY)
    found = (await connector(client, deployment(client)).look())["decode"]
    states = {each.id: (each.state, each.reason) for each in found.replicas or ()}
    assert states == {
        "vllm-1": ("ready", None),
        "no-node": ("failed", "0/3 nodes fit"),
        "crashes": ("failed", "back-off 40s"),
        "loads": ("starting", None),
    }


async def test_the_pods_that_the_caller_names_are_the_first_to_end(client: AsyncClient) -> None:
    await client.create(workload(Deployment, "decode", 2))
    for name in ("one", "two"):
        await place(client, name, {"app": "decode", "penstock.io/worker": f"worker-{name}"}, READY)
    scaling = connector(client, deployment(client))
    await scaling.look()
    assert await scaling.scale({"decode": 1}, (), WHY, without=["worker-two"]) == {}
    costs = {name: (await client.get(Pod, name)).to_dict()["metadata"].get("annotations") for name in ("one", "two")}
    assert costs == {"one": None, "two": {DELETION_COST: "-1000"}}


# --- writers besides us, failures -------------------------------------------------------------------------------------


async def test_a_number_that_somebody_set_since_the_look_is_left_alone(client: AsyncClient) -> None:
    for name in ("prefill", "decode"):
        await client.create(workload(Deployment, name, 2))
    scaling = connector(client, deployment(client, "prefill"), deployment(client, "decode"))
    await scaling.look()
    await client.patch(Deployment.Scale, "decode", {"spec": {"replicas": 6}})
    problems = await scaling.scale({"decode": 1, "prefill": 3}, (), WHY)
    assert "somebody set it from 2 to 6" in problems["decode"]
    assert "somebody set decode from 2 to 6" in problems["prefill"]
    assert [await replicas(client, Deployment, name) for name in ("prefill", "decode")] == [2, 6]
    assert (await scaling.look())["decode"].desired == 6
    assert await scaling.scale({"decode": 1, "prefill": 3}, (), WHY) == {}


async def test_a_change_of_something_else_is_no_conflict(client: AsyncClient) -> None:
    await client.create(workload(Deployment, "decode", 2))
    target = deployment(client)
    scaling = connector(client, target)
    await scaling.look()
    write, calls = target.write, []

    async def meets_another_writer(name: str, count: int, readings: Any) -> None:
        calls.append(count)
        if len(calls) == 1:
            await client.patch(Deployment, "decode", {"metadata": {"annotations": {"by": "hand"}}})
        await write(name, count, readings)

    target.write = meets_another_writer  # type: ignore[method-assign]
    assert await scaling.scale({"decode": 4}, (), WHY) == {}
    assert (len(calls), await replicas(client, Deployment, "decode")) == (2, 4)


async def test_without_an_api_server_nothing_is_scaled_and_that_is_a_reason(
    server: ApiServer, client: AsyncClient
) -> None:
    await client.create(workload(Deployment, "decode", 2))
    scaling = connector(client, deployment(client))
    await scaling.look()
    await server.__aexit__(None, None, None)
    assert "can't be reached" in (await scaling.scale({"decode": 3}, (), WHY))["decode"]
    with pytest.raises(PenstockError, match="can't be reached"):
        await scaling.look()


async def test_the_next_decision_waits_for_the_pods_of_the_one_before_where_that_is_set(client: AsyncClient) -> None:
    await client.create(workload(Deployment, "decode", 1))
    await place(client, "one", {"app": "decode"}, READY)
    now = 0.0
    scaling = connector(client, deployment(client), wait=True, clock=lambda: now)
    await scaling.look()
    assert await scaling.scale({"decode": 2}, (), WHY) == {}
    await scaling.look()
    assert "the pods of decode are not ready" in (await scaling.scale({"decode": 3}, (), WHY))["decode"]
    await place(client, "two", {"app": "decode"}, READY)
    await scaling.look()
    assert await scaling.scale({"decode": 3}, (), WHY) == {}
    await scaling.look()
    now = 1801.0
    assert await scaling.scale({"decode": 4}, (), WHY) == {}


# --- DynamoGraphDeployment --------------------------------------------------------------------------------------------


@pytest.fixture
async def graphs(client: AsyncClient) -> AsyncClient:
    await define(client, NVIDIA, GRAPH, GRAPHS, "v1alpha1")
    await define(client, NVIDIA, ADAPTER, ADAPTERS, "v1alpha1", scale=True)
    return client


def graph(client: AsyncClient, *roles: Any) -> KubernetesConnector:
    return connector(client, GraphDeployment(client, "llm", model="m", roles=roles or ("prefill", "decode")))


async def put_graph(client: AsyncClient, spec: dict[str, Any], version: str = "v1alpha1") -> Any:
    return await put(client, NVIDIA, version, GRAPH, GRAPHS, "llm", spec=spec)


async def test_services_of_a_graph_are_pools_by_their_type(graphs: AsyncClient) -> None:
    services = {
        "Frontend": {"componentType": "frontend", "replicas": 1},
        "P": service_alpha("prefill", 1, gpus="2", model="m"),
        "D": service_alpha("decode", 2, gpus="4", model="m"),
    }
    resource = await put_graph(graphs, graph_alpha(**services))
    scaling = graph(graphs)
    await scaling.validate()
    found = await scaling.look()
    assert {name: (each.role, each.desired, each.gpus) for name, each in found.items()} == {
        "prefill": ("prefill", 1, 2),
        "decode": ("decode", 2, 4),
    }
    assert await scaling.scale({"prefill": 3, "decode": 1}, (), WHY) == {}
    stored = (await graphs.get(resource, "llm")).to_dict()["spec"]["services"]
    assert {name: each["replicas"] for name, each in stored.items()} == {"Frontend": 1, "P": 3, "D": 1}


async def test_components_of_v1beta1_are_patched_at_their_place(client: AsyncClient) -> None:
    await define(client, NVIDIA, GRAPH, GRAPHS, "v1beta1")
    components = [
        component_beta("front", "frontend", 1),
        component_beta("p", "prefill", 1, gpus=1),
        component_beta("d", "decode", 2, gpus=8),
    ]
    resource = await put_graph(client, graph_beta(*components), "v1beta1")
    scaling = graph(client)
    assert (await scaling.look())["decode"].gpus == 8
    assert await scaling.scale({"decode": 5}, (), WHY) == {}
    stored = (await client.get(resource, "llm")).to_dict()["spec"]["components"]
    assert [each["replicas"] for each in stored] == [1, 1, 5]


async def test_a_scaling_adapter_owns_the_number_of_its_service(graphs: AsyncClient) -> None:
    resource = await put_graph(graphs, graph_alpha(P=service_alpha("prefill", 1), D=service_alpha("decode", 1)))
    spec = {"replicas": 3, "dgdRef": {"name": "llm", "serviceName": "D"}}
    adapter = await put(graphs, NVIDIA, "v1alpha1", ADAPTER, ADAPTERS, "llm-d", spec=spec)
    other = {"replicas": 9, "dgdRef": {"name": "another", "serviceName": "P"}}
    await put(graphs, NVIDIA, "v1alpha1", ADAPTER, ADAPTERS, "another-p", spec=other)
    scaling = graph(graphs)
    assert {name: each.desired for name, each in (await scaling.look()).items()} == {"prefill": 1, "decode": 3}
    assert await scaling.scale({"decode": 4, "prefill": 2}, (), WHY) == {}
    assert await replicas(graphs, adapter, "llm-d") == 4
    stored = (await graphs.get(resource, "llm")).to_dict()["spec"]["services"]
    assert {name: each["replicas"] for name, each in stored.items()} == {"P": 2, "D": 1}, "the operator copies D's"


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ({"D": service_alpha("decode", 1)}, r"must have a service with subComponentType 'prefill'; its services are D"),
        ({}, r"must have a service with subComponentType 'prefill'; its services are none at all"),
        (
            {"A": service_alpha("prefill", 1), "B": service_alpha("prefill", 1), "D": service_alpha("decode", 1)},
            r"only one service with subComponentType 'prefill', and has A, B",
        ),
        (
            {"P": service_alpha("prefill", 1, model="m"), "D": service_alpha("decode", 1, model="n")},
            r"prefill serves m and decode serves n",
        ),
        (
            {"P": service_alpha("prefill", 1, model="n"), "D": service_alpha("decode", 1, model="n")},
            r"serves n, and the config's model is m",
        ),
    ],
)
async def test_a_graph_that_can_not_be_planned_is_refused_at_the_start(
    graphs: AsyncClient, services: Any, words: str
) -> None:
    await put_graph(graphs, graph_alpha(**services))
    with pytest.raises(ConfigError, match=words):
        await graph(graphs).validate()


async def test_a_graph_that_is_not_there_is_refused_by_name(graphs: AsyncClient) -> None:
    with pytest.raises(ConfigError, match="no DynamoGraphDeployment llm in namespace default"):
        await graph(graphs).validate()


async def test_legacy_names_count_with_a_warning(graphs: AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    services = {"VllmPrefillWorker": service_alpha(None, 1), "VllmDecodeWorker": service_alpha(None, 2)}
    await put_graph(graphs, graph_alpha(**services))
    assert {name: each.desired for name, each in (await graph(graphs).look()).items()} == {"prefill": 1, "decode": 2}
    assert "VllmPrefillWorker is taken for prefill by its name alone, which is deprecated" in caplog.text


async def test_an_aggregated_worker_is_the_decode_service(graphs: AsyncClient) -> None:
    await put_graph(graphs, graph_alpha(D=service_alpha("decode", 2)))
    assert (await graph(graphs, "aggregated").look())["decode"].role == "aggregated"


# --- PenstockCluster --------------------------------------------------------------------------------------------------


async def test_our_own_resource_is_applied_by_a_manager_of_its_own(client: AsyncClient) -> None:
    await define(client, OWN_GROUP, "PenstockCluster", "penstockclusters", "v1alpha1")
    pools = {"prefill": {"role": "prefill", "replicas": 1, "gpus": 2}, "decode": {"role": "decode", "replicas": 2}}
    spec = {"models": {"m": {"pools": pools}}, "slo": {"ttft": "1s"}}
    where = (OWN_GROUP, "v1alpha1", "PenstockCluster", "penstockclusters")
    resource = await put(client, *where, "own", spec=spec)
    labels = {"app.kubernetes.io/instance": "own", "penstock.io/pool": "decode", "penstock.io/worker": "decode-1"}
    await place(client, "own-decode-1", labels, READY)
    scaling = connector(client, OwnCluster(client, "own"))
    found = await scaling.look()
    assert {name: (each.desired, each.gpus) for name, each in found.items()} == {"prefill": (1, 2), "decode": (2, 1)}
    assert found["decode"].ids == ["decode-1"]
    for counts in ({"decode": 4, "prefill": 2}, {"decode": 3}):
        assert await scaling.scale(counts, (), WHY) == {}
        await scaling.look()
    stored = (await client.get(resource, "own")).to_dict()
    assert {name: each["replicas"] for name, each in stored["spec"]["models"]["m"]["pools"].items()} == {
        "prefill": 2,
        "decode": 3,
    }
    assert stored["spec"]["slo"] == {"ttft": "1s"}
    managers = {entry["manager"]: entry["operation"] for entry in stored["metadata"]["managedFields"]}
    assert managers["penstock-planner"] == "Apply"


async def test_two_at_a_time_are_one_after_the_other(client: AsyncClient) -> None:
    await client.create(workload(Deployment, "decode", 1))
    scaling = connector(client, deployment(client))
    await scaling.look()
    first, second = await asyncio.gather(scaling.scale({"decode": 2}, (), WHY), scaling.scale({"decode": 3}, (), WHY))
    assert (first, second) == ({}, {"decode": "the decision before it is still being written"})
    assert await replicas(client, Deployment, "decode") == 2


# --- rights and lost answers ------------------------------------------------------------------------------------------


async def of_user(server: ApiServer, client: AsyncClient, tmp_path: Path, rules: list[dict[str, Any]]) -> AsyncClient:
    """Return a client of a user who may do only what the rules say; their Role is named planner."""
    server.access.add_user("planner-token", "planner")
    await client.create(Role.from_dict({"metadata": {"name": "planner"}, "rules": rules}))
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "planner"}
    subject = {"kind": "User", "name": "planner", "apiGroup": "rbac.authorization.k8s.io"}
    await client.create(
        RoleBinding.from_dict({"metadata": {"name": "planner"}, "roleRef": reference, "subjects": [subject]})
    )
    server.write_kubeconfig(tmp_path / "planner", "planner-token")
    return AsyncClient(config=KubeConfig.from_file(tmp_path / "planner").get())


async def test_a_planner_without_the_right_says_which_and_scales_once_it_has_it(
    server: ApiServer, client: AsyncClient, tmp_path: Path
) -> None:
    await client.create(workload(Deployment, "decode", 2))
    await place(client, "one", {"app": "decode"}, READY)
    reads = [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get"], "resourceNames": ["decode"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    user = await of_user(server, client, tmp_path, reads)
    scaling = connector(user, deployment(user))
    found = (await scaling.look())["decode"]
    why = "the planner may not patch deployments/scale of apps in namespace default, so it only observes"
    assert (found.problem, found.ids) == (why, ["one"])
    assert await scaling.scale({"decode": 3}, (), WHY) == {"decode": why}
    patch = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["patch"], "resourceNames": ["decode"]}
    await client.patch(Role, "planner", {"rules": [*reads, patch]}, patch_type=PatchType.MERGE)
    assert (await scaling.look())["decode"].problem is None
    assert await scaling.scale({"decode": 3}, (), WHY) == {}
    # The right is taken away again while it works.
    await client.patch(Role, "planner", {"rules": reads}, patch_type=PatchType.MERGE)
    assert 'cannot patch resource "deployments/scale"' in (await scaling.scale({"decode": 4}, (), WHY))["decode"]
    assert (await scaling.look())["decode"].problem == why
    await user.close()


async def test_without_the_right_to_list_pods_only_numbers_are_known(
    server: ApiServer, client: AsyncClient, tmp_path: Path
) -> None:
    await client.create(workload(Deployment, "decode", 2))
    rules = [{"apiGroups": ["apps"], "resources": ["deployments", "deployments/scale"], "verbs": ["get", "patch"]}]
    user = await of_user(server, client, tmp_path, rules)
    scaling = connector(user, deployment(user))
    found = (await scaling.look())["decode"]
    assert (found.replicas, found.problem) == (None, None)
    assert await scaling.scale({"decode": 3}, (), WHY) == {}
    await user.close()


async def test_a_pool_that_may_not_even_be_read_is_a_failed_look_with_the_right_that_it_takes(
    server: ApiServer, client: AsyncClient, tmp_path: Path
) -> None:
    await client.create(workload(Deployment, "decode", 2))
    user = await of_user(server, client, tmp_path, [])
    with pytest.raises(PenstockError, match='cannot get resource "deployments" in API group "apps"'):
        await connector(user, deployment(user)).look()
    await user.close()


async def test_after_a_lost_answer_nothing_else_grows_until_it_is_known(server: ApiServer, client: AsyncClient) -> None:
    for name in ("prefill", "decode"):
        await client.create(workload(Deployment, name, 2))
    scaling = connector(client, deployment(client, "prefill"), deployment(client, "decode"))
    await scaling.look()
    server.faults.add(ApiFault(kind="lost-answer", times=1, resources=("deployments/scale",), names=("decode",)))
    problems = await scaling.scale({"decode": 5, "prefill": 3}, (), WHY)
    assert "no answer" in problems["decode"]
    assert "decode may still become 5" in problems["prefill"]
    assert await replicas(client, Deployment, "decode") == 5, "it was carried out"
    assert (await scaling.look())["decode"].desired == 5
    assert await scaling.scale({"prefill": 3}, (), WHY) == {}
