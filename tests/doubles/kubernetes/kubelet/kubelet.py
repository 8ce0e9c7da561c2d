"""Kubelet of the scripted nodes: reports them as alive, and starts and ends the pods that are given to them."""

import asyncio
import logging
import time
from pathlib import Path

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import LOST, ClusterScript, ScriptedNode
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, deleting, name_of, timestamp
from tests.doubles.kubernetes.controllers.owned_pods import condition, phase
from tests.doubles.kubernetes.controllers.pod_scheduler import UNREACHABLE
from tests.doubles.kubernetes.kubelet.pod_life import PodLife
from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork
from tests.doubles.kubernetes.kubelet.pod_sandbox import PodSandbox
from tests.doubles.kubernetes.kubelet.service_proxy import ServiceProxy

log = logging.getLogger(__name__)

NODE_INFO = (
    *("architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion"),
    *("machineID", "operatingSystem", "osImage", "systemUUID"),
)
"""What a node always says of itself; some clients read no node without."""
HEARTBEAT_S = 10.0
"""Seconds between two signs of life of a node."""
LOOK_S = 0.02
"""Seconds between two looks at the cluster's objects for changes."""


class Kubelet:
    """Runs pods of all nodes of a script."""

    def __init__(
        self, objects: ClusterObjects, script: ClusterScript, folder: Path, network: PodNetwork, proxy: ServiceProxy
    ) -> None:
        self._objects = objects
        self._script = script
        self._folder = folder
        self._network = network
        self._proxy = proxy
        self._pods: dict[str, PodLife] = {}
        self._heartbeats: dict[str, float] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled; then end every process."""
        try:
            while True:
                try:
                    await self._look()
                except Exception:  # the API server is away or refuses: what runs goes on, and it is tried again
                    log.exception("the kubelet failed and tries again")
                    await asyncio.sleep(LOOK_S * 10)
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.gather(*(life.end() for life in self._pods.values()), *self._ending)

    async def _look(self) -> None:
        lost: dict[str, str] = {}
        for scripted in self._script.nodes:
            node = self._objects.get("Node", "", scripted.name)
            lost[scripted.name] = ((node or {}).get("metadata", {}).get("annotations") or {}).get(LOST, "")
            if not lost[scripted.name]:
                await self._beat(scripted, node)
        await self._proxy.reconcile()
        names: dict[str, str] = {}
        present = set()
        for pod in self._objects.all("Pod"):
            uid, where = pod["metadata"]["uid"], pod["spec"].get("nodeName")
            if where not in lost:
                continue
            present.add(uid)
            life = self._pods.get(uid)
            if life is None:
                if not lost[where]:
                    await self._begin(pod)
                continue
            await self._observe(life, pod, lost[where])
            namespace = name_of(pod)[0]
            if namespace not in names:
                names[namespace] = self._proxy.hosts(namespace)
            life.sandbox.write_hosts(names[namespace])
        for uid in self._pods.keys() - present:
            task = asyncio.create_task(self._pods.pop(uid).end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _begin(self, pod: JsonObject) -> None:
        if deleting(pod) or phase(pod) in ("Succeeded", "Failed"):  # it ended in an earlier life of this kubelet
            if deleting(pod):
                await self._objects.delete(pod, grace_s=0)
            return
        sandbox = PodSandbox(self._objects, pod, self._script, self._folder, self._network)
        life = self._pods[sandbox.uid] = PodLife(sandbox)
        await life.start()
        sandbox.write_hosts(self._proxy.hosts(name_of(pod)[0]))

    async def _observe(self, life: PodLife, pod: JsonObject, lost: str) -> None:
        goes_off = lost == "off" and not life.silent
        if not lost and life.silent:
            life.sandbox.powered.set()
        if pod is not life.sandbox.pod or bool(lost) != life.silent:
            life.silent = bool(lost)
            await life.observe(pod)
            await life.confirm_removal()
        if goes_off:  # after its network: a node without power closes no connection
            life.lose_power()

    async def _beat(self, scripted: ScriptedNode, node: JsonObject | None) -> None:
        now = time.time()
        state = condition(node or {}, "Ready")
        due = self._heartbeats.get(scripted.name, 0.0) + HEARTBEAT_S / self._script.speed
        if node is not None and state.get("status") == "True" and now < due:
            return
        self._heartbeats[scripted.name] = now
        if node is None:
            labels = {"kubernetes.io/hostname": scripted.name, "kubernetes.io/os": "linux"}
            labels |= {"nvidia.com/gpu.product": scripted.product} if scripted.gpus else {}
            head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": scripted.name, "labels": labels}}
            node = await self._objects.create({**head, "spec": {}})
            if node is None:
                return
        room = {"cpu": scripted.cpu, "memory": scripted.memory, "pods": str(scripted.pods)}
        room |= {"nvidia.com/gpu": str(scripted.gpus)} if scripted.gpus else {}
        new = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
        }
        moved = state.get("lastTransitionTime") if state.get("status") == "True" else timestamp(now)
        ready = {**new, "lastHeartbeatTime": timestamp(now), "lastTransitionTime": moved}
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": scripted.name}]
        status = {"capacity": room, "allocatable": room, "conditions": [ready], "addresses": addresses}
        facts = {**dict.fromkeys(NODE_INFO, ""), "kubeletVersion": "v1.35.0", "operatingSystem": "linux"}
        await self._objects.set_status(node, {**status, "nodeInfo": facts})
        taints = node["spec"].get("taints") or ()
        if any(taint["key"] == UNREACHABLE for taint in taints):
            left = [taint for taint in taints if taint["key"] != UNREACHABLE]
            await self._objects.merge(node, {"spec": {"taints": left or None}})
