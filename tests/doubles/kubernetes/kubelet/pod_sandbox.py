"""Sandbox of a pod: what its containers share, from the network to the folder."""

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import ClusterScript
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects
from tests.doubles.kubernetes.kubelet.container_environment import PodEnvironment, VolumeMount
from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork


class PodSandbox:
    """One pod on its node; ``pod`` is the object as the API server last had it."""

    def __init__(
        self, objects: ClusterObjects, pod: JsonObject, script: ClusterScript, folder: Path, network: PodNetwork
    ) -> None:
        metadata = pod["metadata"]
        self.objects = objects
        self.pod = pod
        self.script = script
        self.network = network
        self.uid: str = metadata["uid"]
        self.folder = folder / "pods" / self.uid
        self.logs = folder / "logs" / metadata["namespace"] / metadata["name"]
        self.hosts = self.folder / "hosts"
        self.hostname: str = pod["spec"].get("hostname") or metadata["name"]
        self.address = ""
        self.environment: PodEnvironment
        self.changed = asyncio.Event()
        self.powered = asyncio.Event()
        self.powered.set()
        self._claims = folder / "claims"
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def speed(self) -> float:
        """How many times as fast pauses pass."""
        return self.script.speed

    @property
    def grace_s(self) -> float:
        """Seconds that its containers have to end."""
        grace = self.pod["metadata"].get("deletionGracePeriodSeconds")
        return float(self.pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace)

    @property
    def network_path(self) -> str:
        """Where its network namespace can be opened."""
        return self.network.namespace_of(self.uid)

    async def open(self) -> None:
        """Make its folders and its network; the logs of an earlier pod of its name go."""
        shutil.rmtree(self.logs, ignore_errors=True)
        for folder in (self.folder, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.address = await self.network.attach(self.uid)
        (self.folder / "resolv.conf").write_text("")
        self.hosts.write_text("")
        self.environment = PodEnvironment(self.objects, self.pod, self.folder, self.address, self._claims)

    async def close(self) -> None:
        """Give its network back."""
        await cancel_all(self._tasks)
        self.network.detach(self.uid)

    def resolver_mounts(self) -> list[VolumeMount]:
        """Return the files by which its containers resolve names: hosts has the cluster's, no server is asked."""
        files = {"/etc/hosts": self.hosts, "/etc/resolv.conf": self.folder / "resolv.conf"}
        return [VolumeMount(str(source), target, False) for target, source in files.items()]

    def write_hosts(self, lines: str) -> None:
        """Write the names that its containers can resolve; in place, because the file is mounted."""
        text = f"127.0.0.1 localhost\n{self.address} {self.hostname}\n{lines}"
        if self.hosts.read_text() != text:
            with self.hosts.open("r+") as file:
                file.write(text)
                file.truncate()

    def report(self) -> None:
        """Have the pod's status written soon."""
        self.changed.set()

    async def event(self, reason: str, message: str, warning: bool = False) -> None:
        """Record an event about the pod, unless its node is off."""
        if self.powered.is_set():
            await self.objects.event(self.pod, reason, message, warning)

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something beside the rest, at most until the sandbox is closed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
