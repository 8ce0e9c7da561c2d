"""API access of the connector: calls with a deadline, pods as replicas, marks on pods, rights of our account."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx2
from lightkube import ApiError, AsyncClient
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from penstock.kernel.values import JsonObject, Replica
from penstock_kubernetes.api.rights import is_allowed
from penstock_kubernetes.connector.scale_target import (
    ApiRight,
    OutcomeUnknown,
    RightMissing,
    TargetError,
    WriteConflict,
)

T = TypeVar("T")

CALL_TIMEOUT = 10.0
"""Seconds that one call may take: an API server that needs longer is overloaded, and the next tick comes soon."""
NOT_FOUND = 404


async def call(what: str, request: Callable[[], Awaitable[T]]) -> T:
    """Return the answer to one call.

    Args:
        what: the call in words, such as "read Deployment vllm".
    Raises:
        TargetError: it failed; its class says what is known of the object now.
    """
    try:
        async with asyncio.timeout(CALL_TIMEOUT):
            return await request()
    except ApiError as error:
        text = f"the API server did not {what}: {error.status.message or error.status.reason}"
        match error.status.code or 0:
            case 401 | 403:
                raise RightMissing(text) from error
            case 409:
                raise WriteConflict(text) from error
            case code if code >= 500:
                raise OutcomeUnknown(text) from error
            case _:
                raise TargetError(text) from error
    except httpx2.ConnectError as error:
        raise TargetError(f"the API server can't be reached to {what}: {error}") from error
    except (httpx2.HTTPError, OSError, TimeoutError) as error:
        raise OutcomeUnknown(f"no answer to: {what}: {str(error) or type(error).__name__}") from error


def absent(error: TargetError) -> bool:
    """Return whether an error says that there is no such object or resource."""
    cause = error.__cause__
    return isinstance(cause, ApiError) and cause.status.code == NOT_FOUND


async def missing_rights(client: AsyncClient, rights: Sequence[ApiRight]) -> list[ApiRight]:
    """Return those of the rights that our account does not have in the client's namespace.

    Raises:
        TargetError: the API server does not answer the question.
    """

    async def allowed(right: ApiRight) -> bool:
        review = partial(is_allowed, client, right.verb, right.group, right.resource, right.name)
        return await call(f"review whether we may {right}", review)

    answers = await asyncio.gather(*(allowed(right) for right in rights))
    return [right for right, ok in zip(rights, answers, strict=True) if not ok]


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
    return tuple(_replica_of_pod(pod) for pod in pods if pod.status is None or pod.status.phase != "Succeeded")


async def mark_victims(client: AsyncClient, labels: Mapping[str, str], workers: Collection[str]) -> None:
    """Make the pods of these workers the first that a smaller number ends.

    Raises:
        TargetError: they can't be marked.
    """

    async def marked() -> None:
        async for pod in client.list(Pod, labels=dict(labels)):
            name = pod.metadata.name if pod.metadata and pod.metadata.name else ""
            if _worker_id(pod) in workers:
                change = {"metadata": {"annotations": {DELETION_COST: VICTIM_COST}}}
                await client.patch(Pod, name, change, patch_type=PatchType.MERGE)

    await call("mark the pods to end first", marked)


def gpus_of_pod(spec: Mapping[str, Any]) -> int | None:
    """Return how many GPUs the containers of a pod spec ask for; None where none asks."""
    return _sum_of_known(
        gpus_of_resources(container.get("resources") or {}) for container in spec.get("containers") or ()
    )


def gpus_of_resources(resources: JsonObject) -> int | None:
    """Return the GPUs among resources: their limits, or else their requests; None where there are none."""
    for part in ("limits", "requests"):
        amounts = resources.get(part) or {}
        known = _sum_of_known(int(amounts[name]) for name in GPU_RESOURCES if str(amounts.get(name, "")).isdecimal())
        if known is not None:
            return known
    return None


def _sum_of_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _worker_id(pod: Pod) -> str:
    metadata = pod.metadata
    return "" if metadata is None else (metadata.labels or {}).get(WORKER_LABEL) or metadata.name or ""


def _replica_of_pod(pod: Pod) -> Replica:
    status, metadata = pod.status, pod.metadata
    if metadata is not None and metadata.deletionTimestamp is not None:
        return Replica(id=_worker_id(pod), state="draining")
    if status is None:
        return Replica(id=_worker_id(pod), state="starting")
    conditions = {condition.type: condition for condition in status.conditions or ()}
    ready = conditions.get("Ready")
    if ready is not None and ready.status == "True":
        return Replica(id=_worker_id(pod), state="ready")
    if status.phase == "Failed":
        return Replica(
            id=_worker_id(pod), state="failed", reason=status.message or status.reason or "its pod has failed"
        )
    for container in status.containerStatuses or ():
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None and waiting.reason in _HOPELESS:
            return Replica(id=_worker_id(pod), state="failed", reason=waiting.message or waiting.reason)
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return Replica(id=_worker_id(pod), state="failed", reason=scheduled.message or "no node takes its pod")
    return Replica(id=_worker_id(pod), state="starting")


class ApiAccess:
    """A `penstock_kubernetes.connector.scale_target.ClusterAccess` over an API server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def replicas(self, labels: Mapping[str, str]) -> tuple[Replica, ...]:
        return await replicas_of(self._client, labels)

    async def mark_victims(self, labels: Mapping[str, str], workers: Collection[str]) -> None:
        await mark_victims(self._client, labels, workers)

    async def missing(self, rights: Sequence[ApiRight]) -> Sequence[ApiRight]:
        return await missing_rights(self._client, rights)

    async def close(self) -> None:
        await self._client.close()
