"""Controllers before an API server's double, without a kubelet: the test says what becomes of the pods."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from lightkube import AsyncClient, KubeConfig

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_server import ApiServer
from tests.doubles.kubernetes.cluster_script import ClusterScript
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, deleting, timestamp
from tests.doubles.kubernetes.controllers.controller_loop import run_controllers

PATIENCE_S = 20.0


class ClusterWorld:
    """What a test of controllers does and sees, in namespace default."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.objects = objects

    async def create(self, item: JsonObject) -> JsonObject:
        item["metadata"].setdefault("namespace", "default")
        made = await self.objects.create(item)
        assert made is not None
        return made

    async def until(self, there: Callable[[], object], what: str) -> None:
        """Wait until something is so."""
        end = time.monotonic() + PATIENCE_S
        while not there():
            assert time.monotonic() < end, what
            await asyncio.sleep(0.01)

    def pods(self, **labels: str) -> list[JsonObject]:
        """Return the pods that nobody has deleted, in order of their names."""
        pods = [pod for pod in self.objects.all("Pod", "default") if not deleting(pod)]
        mine = [pod for pod in pods if labels.items() <= pod["metadata"].get("labels", {}).items()]
        return sorted(mine, key=lambda pod: str(pod["metadata"]["name"]))

    def names(self, **labels: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(**labels)]

    def get(self, kind: str, name: str) -> JsonObject:
        return self.objects.get(kind, "default", name) or {}

    def status(self, kind: str, name: str) -> JsonObject:
        return self.get(kind, name).get("status") or {}

    async def set_pod(self, pod: JsonObject, phase: str = "Running", *, ready: bool = True, address: str = "") -> None:
        """Say what became of a pod, as its kubelet would."""
        state = {"type": "Ready", "status": str(ready), "lastTransitionTime": timestamp(time.time() - 60)}
        status: JsonObject = {"phase": phase, "conditions": [state]}
        await self.objects.set_status(pod, status | ({"podIP": address} if address else {}))

    async def pods_become_ready(self) -> None:
        """Make every pod ready that has not ended."""
        for number, pod in enumerate(self.pods()):
            if pod.get("status", {}).get("phase", "Pending") == "Pending":
                await self.set_pod(pod, address=f"10.0.0.{number + 1}")


@asynccontextmanager
async def cluster_world(script: ClusterScript | None = None) -> AsyncIterator[ClusterWorld]:
    """Run an API server and the controllers."""
    with tempfile.TemporaryDirectory() as folder:
        async with ApiServer(Path(folder)) as api:
            client = AsyncClient(config=KubeConfig.from_file(api.kubeconfig).get(), trust_env=False)
            async with ClusterObjects(client) as objects:
                controllers = asyncio.create_task(run_controllers(objects, script or ClusterScript(speed=20)))
                try:
                    yield ClusterWorld(objects)
                finally:
                    controllers.cancel()
                    await asyncio.gather(controllers, return_exceptions=True)


def template(image: str = "engine:1", app: str = "engine", **spec: object) -> JsonObject:
    """Return a pod template."""
    return {"metadata": {"labels": {"app": app}}, "spec": {"containers": [{"name": "engine", "image": image}], **spec}}


def workload(kind: str, name: str, replicas: int, **spec: object) -> JsonObject:
    """Return a Deployment, ReplicaSet or StatefulSet of pods with the label app=NAME."""
    selector = {"matchLabels": {"app": name}}
    body = {"replicas": replicas, "selector": selector, "template": template(app=name), **spec}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": body}
