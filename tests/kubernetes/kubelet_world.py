"""A whole cluster in the test's own process: API server, controllers and pods that run."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_server import ApiServer
from tests.doubles.kubernetes.cluster_double import ClusterDouble
from tests.doubles.kubernetes.cluster_script import ClusterScript
from tests.doubles.kubernetes.controllers.cluster_objects import condition
from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork

PATIENCE_S = 60.0


class KubeletWorld:
    """A cluster with a kubelet, and what a test asks of it."""

    def __init__(self, cluster: ClusterDouble, folder: Path) -> None:
        self.cluster = cluster
        self.objects = cluster.objects
        self.folder = folder

    async def create(self, kind: str, name: str, version: str = "v1", **body: object) -> JsonObject:
        item = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "default"}, **body}
        made = await self.objects.create(item)
        assert made is not None
        return made

    async def pod(self, name: str, *containers: JsonObject, **spec: object) -> None:
        """Make a pod of containers that have a command or an image."""
        each = [{"name": f"c{number}", "image": "any", **one} for number, one in enumerate(containers)]
        body = {"containers": each, "terminationGracePeriodSeconds": 1, **spec}
        await self.create("Pod", name, spec=body)

    def get(self, name: str) -> JsonObject:
        return self.objects.get("Pod", "default", name) or {}

    def container(self, name: str, number: int = 0) -> JsonObject:
        statuses = (self.get(name).get("status") or {}).get("containerStatuses") or [{}] * (number + 1)
        return statuses[number]  # type: ignore[no-any-return]

    def waiting(self, name: str) -> str:
        return str(self.container(name).get("state", {}).get("waiting", {}).get("reason", ""))

    def phase(self, name: str) -> str:
        return str((self.get(name).get("status") or {}).get("phase", ""))

    def ready_pods(self) -> list[str]:
        pods = self.objects.all("Pod", "default")
        return [pod["metadata"]["name"] for pod in pods if self.ready(pod["metadata"]["name"])]

    def ready(self, name: str) -> bool:
        return condition(self.get(name), "Ready").get("status") == "True"

    def log(self, name: str, container: str = "c0") -> str:
        path = self.folder / "logs" / "default" / name / f"{container}.log"
        return path.read_text() if path.exists() else ""

    async def until(self, there: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not there():
            assert time.monotonic() < end, what
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def kubelet_world(folder: Path, script: ClusterScript) -> AsyncIterator[KubeletWorld]:
    async with (
        PodNetwork() as network,
        ApiServer(folder, services=network.services) as api,
        ClusterDouble(api.kubeconfig, folder, network, script) as cluster,
    ):
        yield KubeletWorld(cluster, folder)
