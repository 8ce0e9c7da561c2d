"""Pods of a controller: made from its template, counted for its status, ordered for a scale-down."""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy

import msgspec

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    deleting,
    owner_reference,
    seconds_of,
)

LETTERS = "bcdfghjklmnpqrstvwxz2456789"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_rng = random.Random()


def suffix(length: int = 5) -> str:
    """Return letters that make a name unique."""
    return "".join(_rng.choices(LETTERS, k=length))


def hash_of(template: JsonObject) -> str:
    """Return a name for a pod template: equal ones have the same."""
    digest = hashlib.sha256(msgspec.json.encode(template, order="deterministic")).digest()
    return "".join(LETTERS[byte % len(LETTERS)] for byte in digest[:10])


def pod_of(owner: JsonObject, template: JsonObject, name: str, labels: Mapping[str, str] | None = None) -> JsonObject:
    """Return a new pod from a template."""
    pod = deepcopy(template)
    metadata = pod.setdefault("metadata", {})
    metadata |= {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": {**(metadata.get("labels") or {}), **(labels or {})},
        "ownerReferences": [owner_reference(owner)],
    }
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def condition(item: JsonObject, kind: str) -> JsonObject:
    """Return a condition of an object; {} where it has none of that kind."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def with_condition(item: JsonObject, kind: str, true: bool, reason: str, message: str = "") -> list[JsonObject]:
    """Return an object's conditions with one of them as it is now; its transition time moves only with its status."""
    before = condition(item, kind)
    status = "True" if true else "False"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    new: JsonObject = {"type": kind, "status": status, "reason": reason, "message": message}
    new["lastTransitionTime"] = before["lastTransitionTime"] if before.get("status") == status else now
    return [*(each for each in (item.get("status") or {}).get("conditions") or () if each["type"] != kind), new]


def phase(pod: JsonObject) -> str:
    """Return a pod's phase."""
    return (pod.get("status") or {}).get("phase") or "Pending"


def active(pod: JsonObject) -> bool:
    """Return whether a pod counts as a replica: neither ended nor deleted."""
    return not deleting(pod) and phase(pod) not in ("Succeeded", "Failed")


def ready(pod: JsonObject) -> bool:
    """Return whether a pod's condition says that it is ready."""
    return condition(pod, "Ready").get("status") == "True"


def available(pod: JsonObject, min_ready_s: int) -> bool:
    """Return whether a pod has been ready for long enough."""
    return ready(pod) and time.time() - seconds_of(condition(pod, "Ready").get("lastTransitionTime")) >= min_ready_s


def matches(selector: JsonObject | None, labels: Mapping[str, str] | None) -> bool:
    """Return whether a label selector of the API selects labels; {} selects all, None nothing."""
    if selector is None:
        return False
    labels = labels or {}
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for each in selector.get("matchExpressions") or ():
        key, values = each["key"], each.get("values") or ()
        right = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }
        if not right[each["operator"]]:
            return False
    return True


def replicas_of(owner: JsonObject) -> int:
    """Return how many replicas an object wants; 1 where it doesn't say."""
    replicas = (owner.get("spec") or {}).get("replicas")
    return 1 if replicas is None else int(replicas)


def leaving_first(pods: Iterable[JsonObject], related: Iterable[JsonObject]) -> list[JsonObject]:
    """Return pods in the order in which a ReplicaSet deletes them.

    Unassigned first, then Pending, then not ready, then lower deletion cost, then those on nodes with many pods of the
    same Deployment, then the youngest.
    """
    crowd = Counter(pod["spec"].get("nodeName") for pod in related if active(pod))

    def rank(pod: JsonObject) -> tuple[object, ...]:
        node = pod["spec"].get("nodeName")
        cost = (pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0")
        pending = ("Pending", "Unknown", "Running").index(phase(pod))
        age = -seconds_of(pod["metadata"]["creationTimestamp"])
        return (bool(node), pending, ready(pod), int(cost), -crowd[node] if node else 0, age, pod["metadata"]["name"])

    return sorted(pods, key=rank)


async def create_pods(objects: ClusterObjects, owner: JsonObject, template: JsonObject, count: int) -> None:
    """Create pods with names of chance."""
    for _ in range(count):
        pod = pod_of(owner, template, f"{owner['metadata']['name']}-{suffix()}")
        await objects.create(pod)
