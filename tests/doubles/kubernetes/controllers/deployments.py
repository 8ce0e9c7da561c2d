"""Deployment and ReplicaSet controllers: rollouts, as many pods as wanted, and who leaves first."""

import math
import time
from collections.abc import Sequence
from copy import deepcopy

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    active,
    available,
    condition,
    controller_of,
    create_pods,
    deleting,
    hash_of,
    leaving_first,
    owner_reference,
    ready,
    replicas_of,
    seconds_of,
    timestamp,
    with_condition,
)


async def reconcile_replica_sets(objects: ClusterObjects) -> None:
    """Bring every ReplicaSet to its number of pods."""
    for replica_set in objects.all("ReplicaSet"):
        await _reconcile(objects, replica_set)


async def _reconcile(objects: ClusterObjects, replica_set: JsonObject) -> None:
    spec = replica_set["spec"]
    pods = [pod for pod in objects.owned("Pod", replica_set) if active(pod)]
    missing = replicas_of(replica_set) - len(pods)
    if not deleting(replica_set):
        if missing > 0:
            await create_pods(objects, replica_set, spec["template"], missing)
        elif missing < 0:
            related = [pod for each in _siblings(objects, replica_set) for pod in objects.owned("Pod", each)]
            for pod in leaving_first(pods, related)[:-missing]:
                await objects.delete(pod)
    pods = [pod for pod in objects.owned("Pod", replica_set) if active(pod)]
    status = {
        "replicas": len(pods),
        "readyReplicas": sum(map(ready, pods)),
        "availableReplicas": sum(available(pod, spec.get("minReadySeconds", 0)) for pod in pods),
        "observedGeneration": replica_set["metadata"].get("generation"),
    }
    await objects.set_status(replica_set, status)


def _siblings(objects: ClusterObjects, replica_set: JsonObject) -> list[JsonObject]:
    """Return the ReplicaSets of the same Deployment, this one among them."""
    owner = controller_of(replica_set)
    if owner is None:
        return [replica_set]
    namespace = replica_set["metadata"]["namespace"]
    return [
        each for each in objects.all("ReplicaSet", namespace) if (controller_of(each) or {}).get("uid") == owner["uid"]
    ]


HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


async def reconcile_deployments(objects: ClusterObjects) -> None:
    """Take every Deployment one step on."""
    for deployment in objects.all("Deployment"):
        await _Rollout(objects, deployment).step()


class _Rollout:
    """One Deployment with its ReplicaSets."""

    def __init__(self, objects: ClusterObjects, deployment: JsonObject) -> None:
        self.objects = objects
        self.deployment = deployment
        self.spec = deployment["spec"]
        self.wanted = replicas_of(deployment)
        self.all = sorted(objects.owned("ReplicaSet", deployment), key=_revision)
        self.new = next((each for each in reversed(self.all) if _plain(each) == self.spec["template"]), None)
        strategy = self.spec.get("strategy") or {}
        self.recreate = strategy.get("type") == "Recreate"
        rolling = strategy.get("rollingUpdate") or {}
        self.surge = share(rolling.get("maxSurge", "25%"), self.wanted, up=True)
        self.unavailable = share(rolling.get("maxUnavailable", "25%"), self.wanted, up=False)
        if not self.surge and not self.unavailable:
            self.unavailable = 1

    async def step(self) -> None:
        if not deleting(self.deployment):
            await self._choose_new()
            await self._scale()
        await self._report()

    @property
    def old(self) -> list[JsonObject]:
        new = None if self.new is None else self.new["metadata"]["name"]
        return [each for each in self.all if each["metadata"]["name"] != new]

    async def _choose_new(self) -> None:
        """Make the ReplicaSet of the present template, or raise the revision of one that there was before."""
        latest = max(map(_revision, self.old), default=0)
        if self.new is None:
            self.new = await self.objects.create(self._replica_set(latest + 1))
            self.all = [*self.all, *([self.new] if self.new else [])]
        elif _revision(self.new) <= latest:
            await self._annotate(self.new, latest + 1)
            self.new = self._again(self.new)
        if self.new is not None and _revision(self.new) != _revision(self.deployment):
            await self._annotate(self.deployment, _revision(self.new))

    async def _annotate(self, item: JsonObject, revision: int) -> None:
        await self.objects.merge(item, {"metadata": {"annotations": {REVISION: str(revision)}}})

    def _replica_set(self, revision: int) -> JsonObject:
        metadata, template = self.deployment["metadata"], deepcopy(self.spec["template"])
        name = hash_of(template)
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        labels[HASH] = name
        selector = deepcopy(self.spec["selector"])
        selector.setdefault("matchLabels", {})[HASH] = name
        return {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{metadata['name']}-{name}",
                "namespace": metadata["namespace"],
                "labels": dict(labels),
                "annotations": {REVISION: str(revision)},
                "ownerReferences": [owner_reference(self.deployment)],
            },
            "spec": {
                "replicas": 0,
                "minReadySeconds": self.spec.get("minReadySeconds", 0),
                "selector": selector,
                "template": template,
            },
        }

    async def _scale(self) -> None:
        new, old = self.new, self.old
        if new is None:  # its name is taken
            return
        if self.recreate:
            for each in old:
                await self._resize(each, 0)
            if any(self.objects.owned("Pod", each) for each in old):
                return
            await self._resize(new, self.wanted)
        else:
            room = self.wanted + self.surge - sum(map(replicas_of, self.all))
            if replicas_of(new) > self.wanted:
                await self._resize(new, self.wanted)
            elif room > 0:
                await self._resize(new, min(self.wanted, replicas_of(new) + room))
            await self._shrink([self._again(each) for each in old], self._again(new))

    async def _shrink(self, old: Sequence[JsonObject], new: JsonObject) -> None:
        """Take away old pods: those that do no work first, then as many as may be missing."""
        least = self.wanted - self.unavailable
        total = sum(map(replicas_of, old)) + replicas_of(new)
        spare = total - least - (replicas_of(new) - _count(new, "availableReplicas"))
        if spare <= 0:
            return
        for each in old:
            idle = min(replicas_of(each) - _count(each, "availableReplicas"), spare)
            if idle > 0:
                await self._resize(each, replicas_of(each) - idle)
                spare -= idle
        working = sum(_count(each, "availableReplicas") for each in (*old, new)) - least
        for each in map(self._again, old):
            fewer = min(replicas_of(each), working)
            if fewer > 0:
                await self._resize(each, replicas_of(each) - fewer)
                working -= fewer

    async def _resize(self, replica_set: JsonObject, replicas: int) -> None:
        before, replicas = replicas_of(replica_set), max(0, replicas)
        if before == replicas:
            return
        await self.objects.merge(replica_set, {"spec": {"replicas": replicas}})
        word = "up" if replicas > before else "down"
        message = f"Scaled {word} replica set {replica_set['metadata']['name']} from {before} to {replicas}"
        await self.objects.event(self.deployment, "ScalingReplicaSet", message)

    async def _report(self) -> None:
        sets = [self._again(each) for each in self.all]
        new = self._again(self.new) if self.new else None
        up_to_date = _count(new, "replicas") if new else 0
        counts = {
            "replicas": sum(_count(each, "replicas") for each in sets),
            "updatedReplicas": up_to_date,
            "readyReplicas": sum(_count(each, "readyReplicas") for each in sets),
            "availableReplicas": (working := sum(_count(each, "availableReplicas") for each in sets)),
            "unavailableReplicas": max(0, sum(map(replicas_of, sets)) - working) or None,
        }
        enough = working >= self.wanted - self.unavailable
        conditions = with_condition(
            self.deployment,
            "Available",
            enough,
            f"MinimumReplicas{'Available' if enough else 'Unavailable'}",
            f"Deployment {'has' if enough else 'does not have'} minimum availability.",
        )
        done = up_to_date == counts["replicas"] == working == self.wanted and new is not None
        status = {"conditions": self._progress(conditions, counts, done, new)}
        observed = self.deployment["metadata"].get("generation")
        await self.objects.set_status(self.deployment, {"observedGeneration": observed, **counts, **status})

    def _progress(
        self, conditions: list[JsonObject], counts: dict[str, int | None], done: bool, new: JsonObject | None
    ) -> list[JsonObject]:
        """Return the conditions with what is known of the rollout; a deadline runs from the last progress."""
        status, before = self.deployment.get("status") or {}, condition(self.deployment, "Progressing")
        name, now = new["metadata"]["name"] if new else "", timestamp(time.time())
        keys = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        moved = any(status.get(key, 0) != counts[key] for key in keys)
        moved = moved or status.get("observedGeneration") != self.deployment["metadata"].get("generation")
        since = now if moved else before.get("lastUpdateTime", now)
        late = time.time() - seconds_of(since) > self.spec.get("progressDeadlineSeconds", 600)
        if done:
            reason, message = "NewReplicaSetAvailable", f'ReplicaSet "{name}" has successfully progressed.'
        elif late:
            reason, message = "ProgressDeadlineExceeded", f'ReplicaSet "{name}" has timed out progressing.'
        else:
            reason, message = "ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.'
        made = with_condition(self.deployment, "Progressing", done or not late, reason, message)[-1]
        others = [each for each in conditions if each["type"] != "Progressing"]
        return [*others, {**made, "lastUpdateTime": since}]

    def _again(self, item: JsonObject) -> JsonObject:
        """Return an object as the cache has it now."""
        metadata = item["metadata"]
        return self.objects.get(item["kind"], metadata["namespace"], metadata["name"]) or item


def share(value: int | str, total: int, *, up: bool) -> int:
    """Return a number, or a percentage of a total, rounded."""
    if isinstance(value, int):
        return value
    part = total * int(value.rstrip("%")) / 100
    return math.ceil(part) if up else math.floor(part)


def _revision(item: JsonObject) -> int:
    return int((item["metadata"].get("annotations") or {}).get(REVISION, "0"))


def _count(replica_set: JsonObject, name: str) -> int:
    return int((replica_set.get("status") or {}).get(name) or 0)


def _plain(replica_set: JsonObject) -> JsonObject:
    """Return a ReplicaSet's template as the Deployment had it."""
    template = deepcopy(replica_set["spec"]["template"])
    template["metadata"]["labels"].pop(HASH, None)
    return template  # type: ignore[no-any-return]
