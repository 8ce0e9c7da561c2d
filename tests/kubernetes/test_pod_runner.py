"""Engines as pods: started, adopted, probed and ended before an API server's double; the test plays the kubelet."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from lightkube import AsyncClient, KubeConfig
from lightkube.resources.core_v1 import Pod

from penstock.adapters.connectors.engine_process import EngineTemplate
from penstock.adapters.engines.launch import Launch
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator import engine_pod, pod_runner
from penstock_kubernetes.operator.engine_pod import end_of, lack_of
from penstock_kubernetes.operator.pod_runner import PodPlan, PodRunner
from tests.doubles.kubernetes.api.api_faults import ApiFault
from tests.doubles.kubernetes.api.api_server import ApiServer

CLUSTER: JsonObject = {"metadata": {"name": "demo", "namespace": "default", "uid": "u-1", "generation": 1}}
SETTINGS = SuperviseSettings(stop_grace=1.0, drain_timeout=1.0)


def launch(worker: str, port: int, gpus: object) -> Launch:
    return Launch(argv=("engine", worker), url="http://$(POD_IP):8000", card={"stats": "tcp://$(POD_IP):5557"})


def template(made: JsonObject) -> JsonObject:
    return {"metadata": {}, "spec": {"containers": [{"name": "main", "image": "e", "command": list(made["argv"])}]}}


class World:
    """An API server, a runner before it, and what a kubelet would say."""

    def __init__(self, api: ApiServer, client: AsyncClient) -> None:
        self.api = api
        self.client = client
        self.pools = {"main": EngineTemplate("main", launch)}

    async def runner(self, image: str = "e", gpus: int = 0, desired: int | None = None) -> PodRunner:
        runner = PodRunner(self.client, SETTINGS, CLUSTER, {} if desired is None else {"main": desired})
        runner.plans["main"] = PodPlan(gpus, lambda made: template({"argv": [image, *made.argv]}))
        self.pools["main"] = EngineTemplate("main", launch, gpus)
        await runner.open()
        return runner

    async def pods(self) -> dict[str, JsonObject]:
        return {str(pod.metadata.name): pod.to_dict() async for pod in self.client.list(Pod)}

    async def say(self, name: str, phase: str = "Running", *, ready: bool = True, **more: object) -> None:
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": str(ready), "reason": more.pop("reason", None)},
        ]
        status = {"phase": phase, "podIP": "10.0.0.7", "conditions": conditions, **more}
        await self.client.patch(Pod.Status, name, {"status": status})

    async def serves(self, runner: PodRunner, number: int = 0) -> None:
        worker = f"main-{number}"
        await runner.start("main", self.pools["main"], number, ())
        await self.say(f"demo-{worker}-1")
        while await runner.probe(worker, nothing) is not None:
            await asyncio.sleep(0.01)


async def nothing(url: str) -> str | None:
    return None


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with ApiServer(tmp_path) as api:
        client = AsyncClient(config=KubeConfig.from_file(api.kubeconfig).get(), trust_env=False)
        yield World(api, client)
        await client.close()


async def test_an_engine_is_a_pod_that_its_cluster_owns(world: World) -> None:
    runner = await world.runner()
    await runner.start("main", world.pools["main"], 3, ())
    (pod,) = (await world.pods()).values()
    labels = pod["metadata"]["labels"]
    assert pod["metadata"]["name"] == "demo-main-3-1"
    assert labels["penstock.io/worker"] == "main-3" and labels["app.kubernetes.io/component"] == "engine"
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["kind"] == "PenstockCluster" and owner["controller"] and not owner["blockOwnerDeletion"]
    await runner.close(0.0)


async def test_a_pod_says_what_it_lacks_and_then_where_it_serves(world: World) -> None:
    runner = await world.runner()
    await runner.start("main", world.pools["main"], 0, ())
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    await world.client.patch(Pod.Status, "demo-main-0-1", {"status": {"phase": "Pending", "conditions": [scheduled]}})
    lacks = []
    while "0/3 nodes" not in (lack := str(await runner.probe("main-0", nothing))):
        lacks.append(lack)
        await asyncio.sleep(0.01)
    assert lack == "it is not scheduled: Unschedulable: 0/3 nodes"
    await world.say("demo-main-0-1")
    async with asyncio.timeout(5):
        while await runner.probe("main-0", nothing) is not None:
            await asyncio.sleep(0.01)
    process = runner.process("main-0")
    assert (process.url, process.card["stats"]) == ("http://10.0.0.7:8000", "tcp://10.0.0.7:5557")
    await runner.close(0.0)


async def test_an_image_that_can_not_be_named_is_given_up_at_once(world: World) -> None:
    runner = await world.runner()
    await runner.start("main", world.pools["main"], 0, ())
    waiting = {"name": "main", "ready": False, "restartCount": 0, "image": "e", "imageID": ""}
    waiting["state"] = {"waiting": {"reason": "InvalidImageName", "message": "E"}}  # type: ignore[assignment]
    await world.client.patch(Pod.Status, "demo-main-0-1", {"status": {"containerStatuses": [waiting]}})
    with pytest.raises(EngineError, match="InvalidImageName"):
        while True:
            await runner.probe("main-0", nothing)
            await asyncio.sleep(0.01)
    await runner.close(0.0)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "memory"}, "was ended by Kubernetes: Evicted: memory"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
            },
            "ended with status 137 (OOMKilled)",
        ),
        (
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "False", "reason": "NodeStatusUnknown"}]},
            "is on node n1, which does not answer",
        ),
        ({"phase": "Running"}, None),
    ],
)
def test_how_a_pod_ended_is_said_in_words(status: JsonObject, words: str | None) -> None:
    assert end_of({"metadata": {}, "spec": {"nodeName": "n1"}, "status": status}) == words


def test_a_pod_that_nobody_deleted_by_us_ended() -> None:
    assert end_of(None) == "was deleted, though nobody asked the operator for it"
    deleting = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}, "status": {"phase": "Running"}}
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    deleting["status"] = {"phase": "Running", "conditions": [disrupted]}
    assert end_of(deleting) == "is being deleted by somebody else (EvictionByEvictionAPI)"
    assert lack_of({"metadata": {}, "spec": {}, "status": {}}) == "its pod is not known to a node"


async def test_the_end_of_a_pod_is_noticed(world: World) -> None:
    runner = await world.runner()
    await world.serves(runner)
    ended = asyncio.create_task(runner.ended("main-0"))
    await asyncio.sleep(0.05)
    assert not ended.done()
    await world.client.delete(Pod, "demo-main-0-1", grace_period=0)
    assert "deleted" in await asyncio.wait_for(ended, 5)
    await runner.stop("main-0")
    await runner.start("main", world.pools["main"], 0, ())
    assert "demo-main-0-2" in await world.pods()  # a name is used once
    await runner.close(0.0)


async def test_a_pod_that_is_not_ready_for_too_long_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pod, "UNREADY_MAX", 0.1)
    monkeypatch.setattr(pod_runner, "LOOK_EVERY", 0.05)
    runner = await world.runner()
    await world.serves(runner)
    await world.say("demo-main-0-1", ready=False, reason="ContainersNotReady")
    assert "was not ready for" in await asyncio.wait_for(runner.ended("main-0"), 5)
    await runner.close(0.0)


async def test_the_next_operator_adopts_what_runs_and_names_what_is_outdated(world: World) -> None:
    first = await world.runner()
    for number in range(3):
        await world.serves(first, number)
    await first.close(0.0)
    second = await world.runner(image="newer", desired=2)
    assert second.adopt(world.pools["main"], 5) == (2, {0: (), 1: (), 2: ()}), "which of them go is the fleet's to say"
    assert second.outdated == ["main-0", "main-1", "main-2"]
    await second.start("main", world.pools["main"], 0, ())
    await second.end_survivors({"main": [0, 1, 2]})
    assert second.adopted == ["main-0"] and len(await world.pods()) == 3
    await second.close(0.0)


async def test_pods_of_a_pool_that_is_no_more_are_taken_over_where_frontends_know_them(world: World) -> None:
    first = await world.runner(gpus=1)
    for number in range(2):
        await world.serves(first, number)
    await first.close(0.0)
    second = PodRunner(world.client, SETTINGS, CLUSTER, {})
    await second.open()
    assert second.leftovers({"main-1", "main-7", "other"}) == {"main": {1: ()}}
    assert second.process("main-1").worker == "main-1"
    await second.end_survivors({})
    pods = await world.pods()
    assert "demo-main-1-1" in pods
    assert pods.get("demo-main-0-1", {"metadata": {"deletionTimestamp": 1}})["metadata"]["deletionTimestamp"]
    await second.close(0.0)


async def test_a_pod_with_gpus_is_waited_for_and_another_is_not(world: World) -> None:
    plain = await world.runner()
    await world.serves(plain)
    await asyncio.wait_for(plain.stop("main-0"), 3)
    await plain.close(0.0)
    greedy = await world.runner(gpus=2)
    await greedy.start("main", world.pools["main"], 1, (0, 1))
    await world.client.patch(Pod, "demo-main-1-1", {"spec": {"nodeName": "n"}, "metadata": {"finalizers": ["t/hold"]}})
    stopping = asyncio.create_task(greedy.stop("main-1"))
    await asyncio.sleep(0.5)
    assert not stopping.done(), "its GPUs may still be in use"
    await world.client.patch(Pod, "demo-main-1-1", {"metadata": {"finalizers": None}})
    await world.client.delete(Pod, "demo-main-1-1", grace_period=0)
    await asyncio.wait_for(stopping, 8)
    await greedy.close(0.0)


async def test_a_start_whose_answer_was_lost_makes_one_pod(world: World) -> None:
    runner = await world.runner()
    world.api.faults.add(ApiFault(kind="lost-answer", times=1, verbs=("create",), resources=("pods",)))
    await runner.start("main", world.pools["main"], 0, ())
    assert set(await world.pods()) == {"demo-main-0-1"}
    await runner.close(0.0)


async def test_an_api_server_that_is_away_ends_nothing(world: World) -> None:
    runner = await world.runner()
    await world.serves(runner)
    ended = asyncio.create_task(runner.ended("main-0"))
    world.api.faults.add(ApiFault(kind="refuse", seconds=3.0))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    with pytest.raises(EngineError, match="can't be made"):
        await runner.start("main", world.pools["main"], 1, ())
    assert not ended.done()
    await asyncio.sleep(max(0.0, 4.0 - (time.monotonic() - began)))
    await runner.start("main", world.pools["main"], 1, ())
    assert not ended.done() and len(await world.pods()) == 2
    ended.cancel()
    await runner.close(0.0)
