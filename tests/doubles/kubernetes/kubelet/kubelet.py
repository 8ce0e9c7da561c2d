"""Kubelet: runs the pods of its nodes as processes, and tells the API server what becomes of them."""

import asyncio
import logging
import signal
import time
from contextlib import suppress
from pathlib import Path

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import EVICT, LOST, NETWORK, SIGNAL, ClusterScript, ScriptedNode
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    RequestFailed,
    condition,
    deleting,
    name_of,
    phase,
    timestamp,
    with_condition,
)
from tests.doubles.kubernetes.kubelet.container_life import ContainerLife
from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork, ServiceProxy
from tests.doubles.kubernetes.kubelet.pod_sandbox import PodSandbox

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds before a status is written again that the API server did not take."""


class PodLife:
    """One pod, from its assignment to the kubelet until its object is removed."""

    def __init__(self, sandbox: PodSandbox) -> None:
        spec = sandbox.pod["spec"]
        self.sandbox = sandbox
        self.silent = False
        self.containers = [ContainerLife(sandbox, each, spec["restartPolicy"]) for each in spec["containers"]]
        self._began = timestamp(time.time())
        self._evicted: str | None = None
        self._stopping = False
        self._signal = ""
        self._cut = False
        self._tasks: list[asyncio.Task[object]] = []

    async def start(self) -> None:
        """Start it; it goes on by itself."""
        await self.sandbox.open()
        self._tasks = [asyncio.create_task(each) for each in (self._run(), self._report())]

    async def _run(self) -> None:
        await asyncio.gather(*(each.run() for each in self.containers))
        self.sandbox.report()

    async def observe(self, pod: JsonObject) -> None:
        """Look at the pod's object as it is now: a deletion, or what a test wants to happen to it."""
        self.sandbox.pod = pod
        notes = pod["metadata"].get("annotations") or {}
        if (cut := notes.get(NETWORK) == "cut" or self.silent) != self._cut:
            self._cut = cut
            await self.sandbox.network.cut(self.sandbox.uid, away=cut)
        if self.silent:
            return
        if (wanted := notes.get(SIGNAL, "")) != self._signal:
            self._signal = wanted
            self._send(wanted)
        if EVICT in notes and self._evicted is None:
            self._evicted = notes[EVICT]
            await self.sandbox.event("Evicted", self._evicted, warning=True)
        if (deleting(pod) or self._evicted is not None) and not self._stopping:
            self._stopping = True
            self._tasks.append(asyncio.create_task(self._stop()))
        self.sandbox.report()

    def _send(self, wanted: str) -> None:
        """Send the signal of an annotation such as "KILL" or "KILL:2" to all containers."""
        number = getattr(signal, f"SIG{wanted.partition(':')[0]}", None)
        for each in self.containers:
            if number is not None:
                each.signal(number)

    async def _stop(self) -> None:
        await self.sandbox.event("Killing", f"Stopping container {', '.join(each.name for each in self.containers)}")
        await asyncio.gather(*(each.stop(self.sandbox.grace_s) for each in self.containers))
        self._tasks[0].cancel()
        self.sandbox.report()
        if deleting(self.sandbox.pod):
            await self._remove()

    async def _remove(self) -> None:
        while True:
            if not self.silent:
                try:
                    await self.sandbox.objects.delete(self.sandbox.pod, grace_s=0)
                    return
                except RequestFailed as error:
                    log.info("the end of pod %s can't be reported yet: %s", name_of(self.sandbox.pod), error)
            await asyncio.sleep(RETRY_S)

    async def confirm_removal(self) -> None:
        """Remove the object of a pod that had ended before it was deleted."""
        if self._stopping and deleting(self.sandbox.pod) and self._evicted is not None:
            await self._remove()

    def lose_power(self) -> None:
        """End its processes as its node goes off; they start again once it is on."""
        self.sandbox.powered.clear()
        for each in self.containers:
            each.lose_power()

    async def end(self) -> None:
        """End everything at once."""
        for each in self.containers:
            each.signal(signal.SIGKILL)
        await cancel_all(self._tasks)
        for each in self.containers:
            with suppress(ProcessLookupError):
                await each.stop(0)
        await self.sandbox.close()

    # --- status -------------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await self.sandbox.changed.wait()
            self.sandbox.changed.clear()
            namespace, name = name_of(self.sandbox.pod)
            pod = self.sandbox.objects.get("Pod", namespace, name)
            if pod is None or pod["metadata"]["uid"] != self.sandbox.uid or self.silent:
                continue
            try:
                await self.sandbox.objects.set_status(pod, self._status(pod))
            except RequestFailed as error:
                log.info("the status of pod %s can't be written yet: %s", name, error)
                await asyncio.sleep(RETRY_S)
                self.sandbox.report()

    def _phase(self) -> str:
        if self._evicted is not None:
            return "Failed"
        ends = [each.ended for each in self.containers]
        if None not in ends:
            return "Failed" if any(ends) else "Succeeded"
        started = any(each.running or each.restarts or each.ended is not None for each in self.containers)
        return "Running" if started else "Pending"

    def _status(self, pod: JsonObject) -> JsonObject:
        phase = self._phase()
        over = phase in ("Succeeded", "Failed")
        ready = not over and all(each.ready for each in self.containers)
        unready = "" if ready else "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
        conditions = (pod.get("status") or {}).get("conditions") or ()
        facts = {
            "Initialized": (True, ""),
            "Ready": (ready, unready),
            "ContainersReady": (ready, unready),
            "PodScheduled": (True, ""),
        }
        described = {**pod, "status": {"conditions": list(conditions)}}
        for kind, (true, reason) in facts.items():
            described["status"]["conditions"] = with_condition(described, kind, true, reason)
        status: JsonObject = {
            "phase": phase,
            "conditions": described["status"]["conditions"],
            "hostIP": "127.0.0.1",
            "podIP": self.sandbox.address,
            "podIPs": [{"ip": self.sandbox.address}],
            "startTime": self._began,
            "containerStatuses": [each.status for each in self.containers],
        }
        if self._evicted is not None:
            status |= {"reason": "Evicted", "message": self._evicted}
        return status


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
