"""LeaderWorkerSet controller: pods with stable names in groups around a leader."""

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    deleting,
    hash_of,
    name_of,
    owner_reference,
    pod_of,
    ready,
    replicas_of,
    with_condition,
)

GROUP = "leaderworkerset.x-k8s.io"
PREFIX = "leaderworkerset.sigs.k8s.io"

LEADER_WORKER_SET_CRD: JsonObject = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"leaderworkersets.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {
            "kind": "LeaderWorkerSet",
            "listKind": "LeaderWorkerSetList",
            "plural": "leaderworkersets",
            "singular": "leaderworkerset",
            "shortNames": ["lws"],
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.hpaPodSelector",
                    },
                },
            }
        ],
    },
}
"""The definition of the kind, with any fields in it: its own project's has a schema of all of a pod's fields."""


async def reconcile_leader_worker_sets(objects: ClusterObjects) -> None:
    """Take every LeaderWorkerSet one step on."""
    for worker_set in objects.all("LeaderWorkerSet"):
        groups = _groups(objects, worker_set)
        if not deleting(worker_set):
            await _service(objects, worker_set)
            await _step_groups(objects, worker_set, groups)
        await _report_groups(objects, worker_set, _groups(objects, worker_set))


def _groups(objects: ClusterObjects, worker_set: JsonObject) -> dict[int, list[JsonObject]]:
    """Return the pods of each group, its leader first."""
    groups: dict[int, list[JsonObject]] = {}
    namespace, name = name_of(worker_set)
    for pod in sorted(objects.all("Pod", namespace), key=name_of):
        labels = pod["metadata"].get("labels") or {}
        if labels.get(f"{PREFIX}/name") == name:
            groups.setdefault(int(labels[f"{PREFIX}/group-index"]), []).append(pod)
    for pods in groups.values():
        pods.sort(key=lambda pod: int(pod["metadata"]["labels"][f"{PREFIX}/worker-index"]))
    return groups


async def _step_groups(objects: ClusterObjects, worker_set: JsonObject, groups: dict[int, list[JsonObject]]) -> None:
    """Make the missing pods of each group, its leader first, and take away groups that are too many.

    A pod that ended stays: the policy of all groups here is ``restartPolicy: None``, and no template is changed.
    """
    for index in range(replicas_of(worker_set)):
        pods = groups.get(index, [])
        there = {int(pod["metadata"]["labels"][f"{PREFIX}/worker-index"]) for pod in pods}
        if not pods:  # the name of a worker is free again once the old group has left
            await objects.create(_pod_of_group(worker_set, worker_set, index, 0))
        elif 0 in there and not deleting(pods[0]):  # else its workers leave with their leader
            for worker in set(range(1, _size(worker_set))) - there:
                await objects.create(_pod_of_group(worker_set, pods[0], index, worker))
    for index, pods in groups.items():
        if index >= replicas_of(worker_set) and not deleting(pods[0]):
            await objects.delete(pods[0])


def _pod_of_group(worker_set: JsonObject, owner: JsonObject, index: int, worker: int) -> JsonObject:
    template, name = worker_set["spec"]["leaderWorkerTemplate"], worker_set["metadata"]["name"]
    leader = f"{name}-{index}"
    body = template["workerTemplate"] if worker else template.get("leaderTemplate") or template["workerTemplate"]
    labels = {
        f"{PREFIX}/name": name,
        f"{PREFIX}/group-index": str(index),
        f"{PREFIX}/worker-index": str(worker),
        f"{PREFIX}/group-key": hash_of({"set": name, "group": index}),
    }
    pod_name = f"{leader}-{worker}" if worker else leader
    pod = pod_of(owner, body, pod_name, labels)
    notes = {f"{PREFIX}/size": str(_size(worker_set))} | ({f"{PREFIX}/leader-name": leader} if worker else {})
    pod["metadata"]["annotations"] = {**(pod["metadata"].get("annotations") or {}), **notes}
    pod["spec"] |= {"hostname": pod_name, "subdomain": name}
    address = f"{leader}.{name}.{worker_set['metadata']['namespace']}"
    values = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(_size(worker_set)), "LWS_WORKER_INDEX": str(worker)}
    for container in pod["spec"]["containers"]:
        given = [{"name": key, "value": value} for key, value in values.items()]
        container["env"] = [*given, *(container.get("env") or ())]
    return pod


async def _service(objects: ClusterObjects, worker_set: JsonObject) -> None:
    """Make the headless Service under which the pods of a group find each other."""
    namespace, name = name_of(worker_set)
    if objects.get("Service", namespace, name) is None:
        spec = {"clusterIP": "None", "selector": {f"{PREFIX}/name": name}, "publishNotReadyAddresses": True}
        metadata = {"name": name, "namespace": namespace, "ownerReferences": [owner_reference(worker_set)]}
        await objects.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})


async def _report_groups(objects: ClusterObjects, worker_set: JsonObject, groups: dict[int, list[JsonObject]]) -> None:
    whole = [pods for pods in groups.values() if _whole(worker_set, pods)]
    done = len(whole) == replicas_of(worker_set) == len(groups)
    status = {
        "replicas": len(groups),
        "readyReplicas": len(whole),
        "hpaPodSelector": f"{PREFIX}/name={worker_set['metadata']['name']},{PREFIX}/worker-index=0",
        "observedGeneration": worker_set["metadata"].get("generation"),
        "conditions": with_condition(worker_set, "Available", done, "AllGroupsReady" if done else "GroupsProgressing"),
    }
    await objects.set_status(worker_set, status)


def _size(worker_set: JsonObject) -> int:
    return int(worker_set["spec"]["leaderWorkerTemplate"].get("size") or 1)


def _whole(worker_set: JsonObject, pods: list[JsonObject]) -> bool:
    return len(pods) == _size(worker_set) and all(ready(pod) and not deleting(pod) for pod in pods)
