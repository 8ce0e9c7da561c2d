"""Scheduler and node controller: gives pods to nodes with room for them, and gives up on nodes that are silent."""

import math
import time
from collections import Counter

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    RequestFailed,
    condition,
    deleting,
    name_of,
    phase,
    seconds_of,
    timestamp,
    with_condition,
)

SILENT_S = 40.0
"""Seconds without a sign of life after which a node is Unknown."""
EVICT_S = 300.0
"""Seconds after which the pods of a silent node are deleted."""
_UNITS = {"m": 1e-3, "k": 1e3, "Ki": 2**10, "M": 1e6, "Mi": 2**20, "G": 1e9, "Gi": 2**30, "T": 1e12, "Ti": 2**40}


def quantity(text: str | float) -> float:
    """Return a quantity such as 500m, 2 or 16Gi."""
    word = str(text)
    number = word.rstrip("mkKMGTi")
    return float(number) * _UNITS.get(word[len(number) :], 1.0)


def requests_of(pod: JsonObject) -> Counter[str]:
    """Return what a pod asks of its node: the sum of its containers."""
    total: Counter[str] = Counter({"pods": 1})  # type: ignore[arg-type]
    for container in pod["spec"]["containers"]:
        total.update(_requests(container))
    return total


def _requests(container: JsonObject) -> Counter[str]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return Counter({name: quantity(amount) for name, amount in wanted.items()})  # type: ignore[arg-type]


async def schedule_pods(objects: ClusterObjects) -> None:
    """Give each pod that has no node the emptiest one that has room."""
    used: dict[str, Counter[str]] = {name_of(node)[1]: Counter() for node in objects.all("Node")}
    waiting = []
    for pod in objects.all("Pod"):
        node = pod["spec"].get("nodeName")
        if node in used and phase(pod) not in ("Succeeded", "Failed"):
            used[node].update(requests_of(pod))
        elif not node and not deleting(pod):
            waiting.append(pod)
    for pod in sorted(waiting, key=lambda pod: (pod["metadata"]["creationTimestamp"], name_of(pod))):
        await _place(objects, pod, used)


async def _place(objects: ClusterObjects, pod: JsonObject, used: dict[str, Counter[str]]) -> None:
    reasons: Counter[str] = Counter()
    fits = []
    wanted = requests_of(pod)
    for node in objects.all("Node"):
        name = name_of(node)[1]
        why = _refusal(pod, node, wanted, used[name])
        if why:
            reasons[why] += 1
        else:
            fits.append((sum(map(_shares(node, used[name]), wanted)), name))
    if fits:
        _, name = min(fits)
        namespace, pod_name = name_of(pod)
        target = {"apiVersion": "v1", "kind": "Node", "name": name}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod_name}, "target": target}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod_name}/binding"
        if await objects.raw("POST", path, body, missing=(404, 409)) is not None:
            used[name].update(wanted)
            pod["spec"]["nodeName"] = name
            await objects.event(pod, "Scheduled", f"Successfully assigned {namespace}/{pod_name} to {name}")
        return
    text = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
    message = f"0/{sum(reasons.values())} nodes are available: {text}."
    if condition(pod, "PodScheduled").get("message") != message:
        conditions = with_condition(pod, "PodScheduled", False, "Unschedulable", message)
        await objects.set_status(pod, {"conditions": conditions})
        await objects.event(pod, "FailedScheduling", message, warning=True)


def _shares(node: JsonObject, used: Counter[str]):  # type: ignore[no-untyped-def]
    room = node["status"]["allocatable"]
    return lambda name: used[name] / max(1.0, quantity(room.get(name, 1)))


def _refusal(pod: JsonObject, node: JsonObject, wanted: Counter[str], used: Counter[str]) -> str:
    """Return why a pod can't be on a node, in the scheduler's words; "" where it can."""
    labels = node["metadata"].get("labels") or {}
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    if condition(node, "Ready").get("status") == "Unknown":
        return "node(s) were unreachable"
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    room = node["status"].get("allocatable") or {}
    short = [name for name, amount in wanted.items() if used[name] + amount > quantity(room.get(name, 0)) + 1e-9]
    return f"Insufficient {short[0]}" if short else ""


class NodeController:
    """Marks silent nodes and takes their pods away; time passes ``speed`` times as fast for both.

    What it could not hear, because the API server was away, is no silence: a real one ends then, and judges anew.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._silent_since: dict[str, float] = {}
        self._heard_since = 0.0

    async def reconcile(self, objects: ClusterObjects) -> None:
        """Judge every node by its last sign of life."""
        for node in objects.all("Node"):
            name, state = name_of(node)[1], condition(node, "Ready")
            if not state:  # its kubelet has just made it
                continue
            silent_s = time.time() - max(self._heard_since, seconds_of(state.get("lastHeartbeatTime")))
            if silent_s < math.ceil(SILENT_S / self._speed) + 1:  # heartbeats are in whole seconds
                self._silent_since.pop(name, None)
                continue
            since = self._silent_since.setdefault(name, time.time())
            if state.get("status") != "Unknown":
                try:
                    await self._mark(objects, node)
                except RequestFailed:
                    self._heard_since = time.time()
                    raise
            if time.time() - since >= EVICT_S / self._speed:
                for pod in _pods_on(objects, name):
                    if not deleting(pod):
                        await objects.delete(pod)

    async def _mark(self, objects: ClusterObjects, node: JsonObject) -> None:
        before, now = condition(node, "Ready"), timestamp(time.time())
        words = {"reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status."}
        state = {**before, "status": "Unknown", "lastTransitionTime": now, **words}
        others = [each for each in node["status"]["conditions"] if each["type"] != "Ready"]
        await objects.set_status(node, {"conditions": [*others, state]})
        for pod in _pods_on(objects, name_of(node)[1]):
            conditions = with_condition(pod, "Ready", False, "NodeNotReady")
            await objects.set_status(pod, {"conditions": conditions})


def _pods_on(objects: ClusterObjects, node: str) -> list[JsonObject]:
    return [pod for pod in objects.all("Pod") if pod["spec"].get("nodeName") == node]
