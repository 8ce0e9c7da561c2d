"""StatefulSet and LeaderWorkerSet controllers: pods with stable names, alone and in groups around a leader."""

from copy import deepcopy

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    available,
    deleting,
    hash_of,
    name_of,
    owner_reference,
    phase,
    pod_of,
    ready,
    replicas_of,
    with_condition,
)

REVISION_LABEL = "controller-revision-hash"


async def reconcile_stateful_sets(objects: ClusterObjects) -> None:
    """Take every StatefulSet one step on."""
    for stateful_set in objects.all("StatefulSet"):
        pods = {ordinal_of(pod): pod for pod in objects.owned("Pod", stateful_set)}
        if not deleting(stateful_set):
            await _step_set(objects, stateful_set, pods)
        await _report_set(objects, stateful_set)


def ordinal_of(pod: JsonObject) -> int:
    """Return the number at the end of a pod's name."""
    return int(pod["metadata"]["name"].rpartition("-")[2])


async def _step_set(objects: ClusterObjects, stateful_set: JsonObject, pods: dict[int, JsonObject]) -> None:
    spec, wanted = stateful_set["spec"], replicas_of(stateful_set)
    parallel = spec.get("podManagementPolicy") == "Parallel"
    for ordinal in range(wanted):
        pod = pods.get(ordinal)
        if pod is None:
            await objects.create(_pod_of_ordinal(stateful_set, ordinal))
        elif phase(pod) in ("Failed", "Succeeded") and not deleting(pod):
            await objects.delete(pod)
        if not parallel and not (pod and not deleting(pod) and _works(stateful_set, pod)):
            return  # the next one waits for this one
    surplus = sorted((ordinal for ordinal in pods if ordinal >= wanted), reverse=True)
    for ordinal in surplus:
        if not deleting(pods[ordinal]):
            await objects.delete(pods[ordinal])
        if not parallel:
            return
    strategy = spec.get("updateStrategy") or {}
    if strategy.get("type") == "OnDelete":
        return
    partition = (strategy.get("rollingUpdate") or {}).get("partition") or 0
    for ordinal in range(wanted - 1, partition - 1, -1):
        pod = pods.get(ordinal)
        if pod is None or deleting(pod):
            return
        if _revision_of(pod) != hash_of(spec["template"]):
            await objects.delete(pod)
            return
        if not _works(stateful_set, pod):
            return


def _pod_of_ordinal(stateful_set: JsonObject, ordinal: int) -> JsonObject:
    spec, name = stateful_set["spec"], f"{stateful_set['metadata']['name']}-{ordinal}"
    labels = {
        "statefulset.kubernetes.io/pod-name": name,
        "apps.kubernetes.io/pod-index": str(ordinal),
        REVISION_LABEL: hash_of(spec["template"]),
    }
    pod = pod_of(stateful_set, deepcopy(spec["template"]), name, labels)
    pod["spec"] |= {"hostname": name, "subdomain": spec.get("serviceName") or ""}
    for claim in spec.get("volumeClaimTemplates") or ():
        volume = claim["metadata"]["name"]
        reference = {"persistentVolumeClaim": {"claimName": f"{volume}-{name}"}}
        pod["spec"].setdefault("volumes", []).append({"name": volume, **reference})
    return pod


def _revision_of(pod: JsonObject) -> str | None:
    return (pod["metadata"].get("labels") or {}).get(REVISION_LABEL)


def _works(stateful_set: JsonObject, pod: JsonObject) -> bool:
    return available(pod, stateful_set["spec"].get("minReadySeconds", 0))


async def _report_set(objects: ClusterObjects, stateful_set: JsonObject) -> None:
    pods = objects.owned("Pod", stateful_set)
    name, update = name_of(stateful_set)[1], hash_of(stateful_set["spec"]["template"])
    updated = sum(_revision_of(pod) == update for pod in pods)
    done = updated == len(pods) == replicas_of(stateful_set) and all(map(ready, pods))
    status = stateful_set.get("status") or {}
    current = f"{name}-{update}" if done else status.get("currentRevision") or f"{name}-{update}"
    counts = {
        "replicas": len(pods),
        "readyReplicas": sum(map(ready, pods)),
        "availableReplicas": sum(_works(stateful_set, pod) for pod in pods),
        "updatedReplicas": updated,
        "currentReplicas": sum(f"{name}-{_revision_of(pod)}" == current for pod in pods),
    }
    revisions = {"currentRevision": current, "updateRevision": f"{name}-{update}"}
    observed = {"observedGeneration": stateful_set["metadata"].get("generation"), "collisionCount": 0}
    await objects.set_status(stateful_set, {**counts, **revisions, **observed})


GROUP = "leaderworkerset.x-k8s.io"
PREFIX = "leaderworkerset.sigs.k8s.io"
GROUP_REVISION_LABEL = f"{PREFIX}/template-revision-hash"

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
    template, size = worker_set["spec"]["leaderWorkerTemplate"], _size(worker_set)
    together = template.get("restartPolicy") != "None"
    for index in range(replicas_of(worker_set)):
        pods = groups.setdefault(index, [])
        broken = together and any(map(_broken, pods))
        if any(map(deleting, pods[:1])):
            continue  # its workers leave with their leader
        if broken and pods:
            await objects.delete(pods[0], propagation="Foreground")
            continue
        there = {int(pod["metadata"]["labels"][f"{PREFIX}/worker-index"]) for pod in pods}
        if 0 not in there:
            if not pods:  # the name of a worker is free again once the old group has left
                await objects.create(_pod_of_group(worker_set, worker_set, index, 0))
            continue
        waits = worker_set["spec"].get("startupPolicy") == "LeaderReady" and not ready(pods[0])
        for worker in range(1, size):
            if worker not in there and not waits:
                await objects.create(_pod_of_group(worker_set, pods[0], index, worker))
    for index in sorted(groups, reverse=True):
        if index >= replicas_of(worker_set):
            for pod in groups[index][:1]:
                if not deleting(pod):
                    await objects.delete(pod)
    await _roll(objects, worker_set, groups)


async def _roll(objects: ClusterObjects, worker_set: JsonObject, groups: dict[int, list[JsonObject]]) -> None:
    """Replace one group of an old template at a time, the last first."""
    wanted = hash_of(worker_set["spec"]["leaderWorkerTemplate"])
    for index in range(replicas_of(worker_set) - 1, -1, -1):
        pods = groups.get(index) or []
        if not pods or deleting(pods[0]):
            return
        if pods[0]["metadata"]["labels"][GROUP_REVISION_LABEL] != wanted:
            await objects.delete(pods[0])
            return
        if not _whole(worker_set, pods):
            return


def _pod_of_group(worker_set: JsonObject, owner: JsonObject, index: int, worker: int) -> JsonObject:
    template, name = worker_set["spec"]["leaderWorkerTemplate"], worker_set["metadata"]["name"]
    leader = f"{name}-{index}"
    body = template["workerTemplate"] if worker else template.get("leaderTemplate") or template["workerTemplate"]
    labels = {
        f"{PREFIX}/name": name,
        f"{PREFIX}/group-index": str(index),
        f"{PREFIX}/worker-index": str(worker),
        f"{PREFIX}/group-key": hash_of({"set": name, "group": index}),
        GROUP_REVISION_LABEL: hash_of(template),
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
    wanted, revision = replicas_of(worker_set), hash_of(worker_set["spec"]["leaderWorkerTemplate"])
    whole = [pods for pods in groups.values() if _whole(worker_set, pods)]
    new = [pods for pods in groups.values() if pods and pods[0]["metadata"]["labels"][GROUP_REVISION_LABEL] == revision]
    done = len(whole) == wanted == len(groups) == len(new)
    status = {
        "replicas": len(groups),
        "readyReplicas": len(whole),
        "updatedReplicas": len(new),
        "hpaPodSelector": f"{PREFIX}/name={worker_set['metadata']['name']},{PREFIX}/worker-index=0",
        "observedGeneration": worker_set["metadata"].get("generation"),
        "conditions": with_condition(worker_set, "Available", done, "AllGroupsReady" if done else "GroupsProgressing"),
    }
    await objects.set_status(worker_set, status)


def _size(worker_set: JsonObject) -> int:
    return int(worker_set["spec"]["leaderWorkerTemplate"].get("size") or 1)


def _whole(worker_set: JsonObject, pods: list[JsonObject]) -> bool:
    return len(pods) == _size(worker_set) and all(ready(pod) and not deleting(pod) for pod in pods)


def _broken(pod: JsonObject) -> bool:
    """Return whether a pod ended or one of its containers was restarted."""
    status = pod.get("status") or {}
    restarts = sum(each.get("restartCount", 0) for each in status.get("containerStatuses") or ())
    return restarts > 0 or deleting(pod) or status.get("phase") in ("Failed", "Succeeded")
