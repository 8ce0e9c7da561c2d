"""ReplicaSet controller: as many pods as wanted, and who leaves first when there are too many."""

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, controller_of, deleting
from tests.doubles.kubernetes.controllers.owned_pods import (
    active,
    available,
    create_pods,
    leaving_first,
    ready,
    replicas_of,
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
        "fullyLabeledReplicas": len(pods),
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
