"""Pods become servers of a pool and leave it, as the API server tells."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.settings.cluster_settings import PoolSettings
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.fleet.fleet_state import HealthLimits
from penstock.kernel.values import Pool
from penstock.testing.store_contract import PATIENCE
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.pod_pool import PodPool, inference_pool
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.discovery.api_cables import KubernetesHarness
from tests.kubernetes.discovery.conftest import install

POOLS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "inferencepools.inference.networking.k8s.io"},
    "spec": {
        "group": "inference.networking.k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                },
            }
        ],
    },
}


class Recorder:
    """In the place of a fleet's driver."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.urls: dict[str, str] = {}
        self.forgotten: Callable[[int], None] = lambda number: None

    def attach_changing(
        self, name: str, configured: Pool, forgotten: Callable[[int], None], health: HealthLimits
    ) -> None:
        self.forgotten = forgotten

    def join(self, server: Any, number: int) -> None:
        self.urls[server.worker] = server.url
        self.did.append(f"join {server.worker}")

    def leave(self, worker: str, *, vanished: bool) -> None:
        self.did.append(f"{'lose' if vanished else 'drain'} {worker}")

    async def until(self, *wanted: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.did != list(wanted):
                await asyncio.sleep(0.02)
        self.did.clear()


class Pods:
    """Pods with an address, as a kubelet would report them."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self.label = prefix
        self._names: set[str] = set()

    async def create(self, name: str, ip: str, *, ready: bool = True, port: str | None = None) -> None:
        from lightkube.resources.core_v1 import Pod

        name = f"{self.label}-{name}"
        labels, ports = {"app": self.label}, [{"name": "http", "containerPort": 8000}]
        container = {"name": "vllm", "image": "vllm", "ports": ports}
        metadata: dict[str, object] = {"name": name, "labels": labels, "finalizers": ["penstock.io/test"]}
        if port is not None:
            metadata["annotations"] = {"penstock.io/port": port}
        await self.client.create(Pod.from_dict({"metadata": metadata, "spec": {"containers": [container]}}))
        self._names.add(name)
        await self.report(name.removeprefix(f"{self.label}-"), ip, ready=ready)

    async def report(self, name: str, ip: str, *, ready: bool) -> None:
        from lightkube.resources.core_v1 import Pod
        from lightkube.types import PatchType

        condition = {"type": "Ready", "status": "True" if ready else "False"}
        status = {"status": {"podIP": ip, "phase": "Running", "conditions": [condition]}}
        await self.client.patch(Pod.Status, f"{self.label}-{name}", status, patch_type=PatchType.MERGE)

    async def delete(self, name: str) -> None:
        """Begin the end of a pod: the finalizer stands for its grace period."""
        from lightkube.resources.core_v1 import Pod

        await self.client.delete(Pod, f"{self.label}-{name}")

    async def vanish(self, name: str) -> None:
        from lightkube import ApiError
        from lightkube.resources.core_v1 import Pod
        from lightkube.types import PatchType

        name = f"{self.label}-{name}"
        await self.client.patch(Pod, name, {"metadata": {"finalizers": None}}, patch_type=PatchType.MERGE)
        try:
            await self.client.delete(Pod, name, grace_period=0)
        except ApiError as error:
            assert error.status.code == 404
        self._names.discard(name)

    async def close(self) -> None:
        for name in list(self._names):
            await self.vanish(name.removeprefix(f"{self.label}-"))


@pytest.fixture
async def pods(kubernetes: KubernetesHarness) -> AsyncIterator[Pods]:
    client = open_client(KubernetesSettings())
    made = Pods(client, kubernetes.cluster.lower().replace(".", "-")[:40].strip("-"))
    yield made
    await made.close()
    await client.close()


@pytest.fixture
async def follow(pods: Pods) -> AsyncIterator[Callable[[str], Recorder]]:
    tasks: list[asyncio.Task[None]] = []

    def begin(selector: str) -> Recorder:
        recorder = Recorder()
        settings = PoolSettings(engine="openai", selector=selector)
        pool = PodPool(pods.client, recorder, "pods", settings, Pool(model="m", desired=0))  # type: ignore[arg-type]
        tasks.append(asyncio.create_task(pool.run()))
        return recorder

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_pods_join_when_ready_drain_when_deleted_and_are_lost_when_they_vanish(pods, follow):
    await pods.create("a", "10.0.0.1")
    await pods.create("b", "10.0.0.2", ready=False)
    fleet = follow(f"app={pods.label}")
    await fleet.until("join pods-0")
    await pods.report("b", "10.0.0.2", ready=True)
    await fleet.until("join pods-1")
    assert fleet.urls == {"pods-0": "http://10.0.0.1:8000", "pods-1": "http://10.0.0.2:8000"}
    await pods.delete("a")
    await fleet.until("drain pods-0")
    await pods.vanish("a")
    await fleet.until("lose pods-0")
    fleet.forgotten(0)
    await pods.report("b", "10.0.0.2", ready=False)
    await fleet.until("drain pods-1")
    await pods.report("b", "10.0.0.2", ready=True)
    await fleet.until("join pods-1")
    await pods.create("c", "10.0.0.3")
    await fleet.until("join pods-0")


async def test_a_pod_that_is_ready_again_before_it_was_forgotten_joins_once_it_is(pods, follow):
    await pods.create("a", "10.0.0.1")
    fleet = follow(f"app={pods.label}")
    await fleet.until("join pods-0")
    await pods.report("a", "10.0.0.1", ready=False)
    await fleet.until("drain pods-0")
    await pods.report("a", "10.0.0.1", ready=True)
    await fleet.until("join pods-0")
    fleet.forgotten(0)
    await fleet.until("join pods-0")


async def test_while_the_api_server_is_away_the_servers_stay(pods, follow, kubernetes):
    await pods.create("a", "10.0.0.1")
    await pods.create("b", "10.0.0.2")
    fleet = follow(f"app={pods.label}")
    await fleet.until("join pods-0", "join pods-1")
    kubernetes.fail()
    await asyncio.sleep(1.5)
    assert fleet.did == []
    kubernetes.mend()
    await pods.vanish("a")
    await fleet.until("lose pods-0")


async def test_an_inference_pool_says_which_pods_and_ports_and_is_followed(
    pods, follow, entries: RunningApi, tmp_path: Path
):
    crd = tmp_path / "inferencepools.yaml"
    crd.write_text(yaml.safe_dump(POOLS))
    await asyncio.to_thread(install, entries.kubeconfig, crd)
    resource, name = inference_pool(), f"{pods.label}-pool"
    await pods.create("a", "10.0.0.1")
    fleet = follow(f"inferencepool/{name}")
    await asyncio.sleep(0.3)
    assert fleet.did == []  # there is no such pool yet
    spec = {"selector": {"matchLabels": {"app": pods.label}}, "targetPorts": [{"number": 9000}, {"number": 9001}]}
    await pods.client.create(resource({"metadata": {"name": name}, "spec": spec}))
    await fleet.until("join pods-0", "join pods-1")
    assert fleet.urls == {"pods-0": "http://10.0.0.1:9000", "pods-1": "http://10.0.0.1:9001"}
    await pods.client.patch(resource, name, {"spec": {"targetPorts": [{"number": 9000}]}}, patch_type=merge())
    await fleet.until("lose pods-1")
    fleet.forgotten(1)
    await pods.client.patch(resource, name, {"spec": {"selector": {"matchLabels": {"app": "no"}}}}, patch_type=merge())
    await fleet.until("lose pods-0")
    await pods.client.delete(resource, name)


def merge() -> Any:
    from lightkube.types import PatchType

    return PatchType.MERGE
