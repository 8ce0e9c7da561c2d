"""Pods of a pool: as replicas with their states, the GPUs that a pod template asks for, and the cost of a deletion."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lightkube import AsyncClient
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from penstock.kernel.values import JsonObject, Replica
from penstock_kubernetes.connector.api_calls import call

WORKER_LABEL = "penstock.io/worker"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST = "-1000"
"""Below the default of 0, so that a ReplicaSet ends these pods first."""
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu")
"""Names of GPUs in limits: of device plugins, and of the short form in a graph deployment's ``resources``."""
_HOPELESS = frozenset(
    {"CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerError"}
)


async def replicas_of(client: AsyncClient, labels: Mapping[str, str]) -> tuple[Replica, ...]:
    """Return the pods with these labels as replicas, those that have ended left out.

    Raises:
        TargetError: they can't be listed.
    """

    async def listed() -> list[Pod]:
        return [pod async for pod in client.list(Pod, labels=dict(labels))]

    pods = await call("list pods", listed)
    return tuple(_replica(pod) for pod in pods if pod.status is None or pod.status.phase != "Succeeded")


async def mark_victims(client: AsyncClient, labels: Mapping[str, str], workers: Collection[str]) -> None:
    """Make the pods of these workers the first that a smaller number ends.

    Raises:
        TargetError: they can't be marked.
    """

    async def marked() -> None:
        async for pod in client.list(Pod, labels=dict(labels)):
            name = pod.metadata.name if pod.metadata and pod.metadata.name else ""
            if _id(pod) in workers:
                change = {"metadata": {"annotations": {DELETION_COST: VICTIM_COST}}}
                await client.patch(Pod, name, change, patch_type=PatchType.MERGE)

    await call("mark the pods to end first", marked)


def gpus_of_pod(spec: Mapping[str, Any]) -> int | None:
    """Return how many GPUs the containers of a pod spec ask for; None where none asks."""
    return _sum(gpus_of_resources(container.get("resources") or {}) for container in spec.get("containers") or ())


def gpus_of_resources(resources: JsonObject) -> int | None:
    """Return the GPUs among resources: their limits, or else their requests; None where there are none."""
    for part in ("limits", "requests"):
        amounts = resources.get(part) or {}
        known = _sum(int(amounts[name]) for name in GPU_RESOURCES if str(amounts.get(name, "")).isdecimal())
        if known is not None:
            return known
    return None


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _id(pod: Pod) -> str:
    metadata = pod.metadata
    return "" if metadata is None else (metadata.labels or {}).get(WORKER_LABEL) or metadata.name or ""


def _replica(pod: Pod) -> Replica:
    status, metadata = pod.status, pod.metadata
    if metadata is not None and metadata.deletionTimestamp is not None:
        return Replica(id=_id(pod), state="draining")
    if status is None:
        return Replica(id=_id(pod), state="starting")
    conditions = {condition.type: condition for condition in status.conditions or ()}
    ready = conditions.get("Ready")
    if ready is not None and ready.status == "True":
        return Replica(id=_id(pod), state="ready")
    if status.phase == "Failed":
        return Replica(id=_id(pod), state="failed", reason=status.message or status.reason or "its pod has failed")
    for container in status.containerStatuses or ():
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None and waiting.reason in _HOPELESS:
            return Replica(id=_id(pod), state="failed", reason=waiting.message or waiting.reason)
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return Replica(id=_id(pod), state="failed", reason=scheduled.message or "no node takes its pod")
    return Replica(id=_id(pod), state="starting")
