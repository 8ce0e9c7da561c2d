"""Scaled object: a Deployment, StatefulSet or LeaderWorkerSet as one pool, scaled by its scale subresource."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from lightkube import AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment, StatefulSet
from lightkube.types import PatchType

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject, Pool
from penstock_kubernetes.connector.api_access import call, gpus_of_pod
from penstock_kubernetes.connector.scale_target import ApiRight, PoolReading

LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""Label of the pod that stands for its group; the others of the group have no replica of their own."""


class ScaledKind(NamedTuple):
    """A kind that has a scale subresource, as the API names it."""

    group: str
    plural: str
    resource: Any


def scaled_kind(kind: str) -> ScaledKind:
    """Return a kind by its name.

    Raises:
        ConfigError: pools of this kind are not known.
    """
    match kind:
        case "Deployment":
            return ScaledKind("apps", "deployments", Deployment)
        case "StatefulSet":
            return ScaledKind("apps", "statefulsets", StatefulSet)
        case "LeaderWorkerSet":
            group = "leaderworkerset.x-k8s.io"
            return ScaledKind(
                group, "leaderworkersets", create_namespaced_resource(group, "v1", kind, "leaderworkersets")
            )
    raise ConfigError(
        f"planner.kubernetes.pools names the kind {kind!r}",
        hint="name a Deployment, a StatefulSet or a LeaderWorkerSet",
    )


class ScaledObject:
    """A `penstock_kubernetes.connector.scale_target.ScaleTarget` of one pool.

    Args:
        pool: the pool as the config has it; the object's own GPUs count before those.
    """

    def __init__(self, client: AsyncClient, kind: str, name: str, *, pool: str, configured: Pool) -> None:
        self._client = client
        self._kind = scaled_kind(kind)
        self._words = f"{kind} {name}"
        self._name = name
        self._pool = pool
        self._configured = configured

    @property
    def rights(self) -> tuple[ApiRight, ...]:
        group, plural, _ = self._kind
        return (
            ApiRight("get", group, plural, self._name),
            ApiRight("patch", group, f"{plural}/scale", self._name),
        )

    async def read(self) -> Mapping[str, PoolReading]:
        resource, client = self._kind.resource, self._client
        stored = (await call(f"read {self._words}", lambda: client.get(resource, self._name))).to_dict()
        spec, meta, status = stored.get("spec") or {}, stored.get("metadata") or {}, stored.get("status") or {}
        gpus, labels = _replica_parts(self._name, spec)
        pool = msgspec.structs.replace(
            self._configured,
            desired=spec.get("replicas", 1),
            gpus=self._configured.gpus if gpus is None else gpus,
            acknowledged=status.get("observedGeneration", meta.get("generation")) == meta.get("generation"),
        )
        return {self._pool: PoolReading(pool, str(meta.get("resourceVersion", "")), labels)}

    async def write(self, pool: str, replicas: int, readings: Mapping[str, PoolReading]) -> None:
        version = readings[pool].version
        await patch_scale(self._client, self._kind.resource, self._name, replicas, version, words=self._words)

    def describe(self) -> str:
        return self._words


async def patch_scale(
    client: AsyncClient, resource: Any, name: str, replicas: int, version: str, *, words: str
) -> None:
    """Set the replicas of an object by its scale subresource, if it is still of this version.

    Raises:
        TargetError: it was not done, or perhaps not.
    """
    body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
    await call(
        f"scale {words} to {replicas}",
        lambda: client.patch(resource.Scale, name, body, patch_type=PatchType.MERGE),
    )


def _replica_parts(name: str, spec: JsonObject) -> tuple[int | None, Mapping[str, str]]:
    """Return the GPUs of one replica, and the labels of the pods that stand for replicas."""
    group = spec.get("leaderWorkerTemplate")
    if group is None:
        template = (spec.get("template") or {}).get("spec") or {}
        return gpus_of_pod(template), (spec.get("selector") or {}).get("matchLabels") or {}
    worker = gpus_of_pod((group.get("workerTemplate") or {}).get("spec") or {})
    leader = worker
    if group.get("leaderTemplate"):
        leader = gpus_of_pod(group["leaderTemplate"].get("spec") or {})
    labels = {"leaderworkerset.sigs.k8s.io/name": name, **LEADER}
    if leader is None and worker is None:
        return None, labels
    return (leader or 0) + (worker or 0) * (int(group.get("size", 1)) - 1), labels
