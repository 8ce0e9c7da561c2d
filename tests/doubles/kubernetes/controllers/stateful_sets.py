"""StatefulSet controller: pods with stable names, started and replaced one after the other."""

from copy import deepcopy

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, deleting, name_of
from tests.doubles.kubernetes.controllers.owned_pods import available, hash_of, phase, pod_of, ready, replicas_of

REVISION_LABEL = "controller-revision-hash"


async def reconcile_stateful_sets(objects: ClusterObjects) -> None:
    """Take every StatefulSet one step on."""
    for stateful_set in objects.all("StatefulSet"):
        pods = {ordinal_of(pod): pod for pod in objects.owned("Pod", stateful_set)}
        if not deleting(stateful_set):
            await _step(objects, stateful_set, pods)
        await _report(objects, stateful_set)


def ordinal_of(pod: JsonObject) -> int:
    """Return the number at the end of a pod's name."""
    return int(pod["metadata"]["name"].rpartition("-")[2])


async def _step(objects: ClusterObjects, stateful_set: JsonObject, pods: dict[int, JsonObject]) -> None:
    spec, wanted = stateful_set["spec"], replicas_of(stateful_set)
    parallel = spec.get("podManagementPolicy") == "Parallel"
    for ordinal in range(wanted):
        pod = pods.get(ordinal)
        if pod is None:
            await objects.create(_pod(stateful_set, ordinal))
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


def _pod(stateful_set: JsonObject, ordinal: int) -> JsonObject:
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


async def _report(objects: ClusterObjects, stateful_set: JsonObject) -> None:
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
