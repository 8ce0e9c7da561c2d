"""PodDisruptionBudget controller: how many pods may be evicted now."""

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, controller_of, deleting
from tests.doubles.kubernetes.controllers.deployments import share
from tests.doubles.kubernetes.controllers.owned_pods import active, matches, ready, replicas_of, with_condition


async def reconcile_disruption_budgets(objects: ClusterObjects) -> None:
    """Write the status of every budget."""
    for budget in objects.all("PodDisruptionBudget"):
        spec, namespace = budget["spec"], budget["metadata"]["namespace"]
        pods = [
            pod
            for pod in objects.all("Pod", namespace)
            if matches(spec.get("selector"), pod["metadata"].get("labels")) and active(pod)
        ]
        expected = _expected(objects, namespace, pods)
        if spec.get("maxUnavailable") is not None:
            wanted = expected - share(spec["maxUnavailable"], expected, up=True)
        else:
            wanted = share(spec.get("minAvailable", 1), expected, up=True)
        healthy = sum(ready(pod) and not deleting(pod) for pod in pods)
        allowed = max(0, healthy - wanted) if expected else 0
        reason = "SufficientPods" if allowed else "InsufficientPods"
        status = {
            "expectedPods": expected,
            "currentHealthy": healthy,
            "desiredHealthy": max(0, wanted),
            "disruptionsAllowed": allowed,
            "observedGeneration": budget["metadata"].get("generation"),
            "conditions": with_condition(budget, "DisruptionAllowed", allowed > 0, reason),
        }
        await objects.set_status(budget, status)


def _expected(objects: ClusterObjects, namespace: str, pods: list[JsonObject]) -> int:
    """Return how many pods there should be: what their controllers want, and each pod without one."""
    owners = {owner["uid"]: owner for pod in pods if (owner := controller_of(pod))}
    found = [objects.get(owner["kind"], namespace, owner["name"]) for owner in owners.values()]
    return sum(replicas_of(each) for each in found if each) + sum(controller_of(pod) is None for pod in pods)
