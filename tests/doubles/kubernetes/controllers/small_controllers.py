"""Controllers of Jobs, of PodDisruptionBudgets, of Services' endpoints, and of what has no owner any more."""

import time
from collections import defaultdict

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    active,
    controller_of,
    deleting,
    matches,
    name_of,
    owner_reference,
    phase,
    pod_of,
    ready,
    replicas_of,
    seconds_of,
    suffix,
    timestamp,
    with_condition,
)
from tests.doubles.kubernetes.controllers.deployments import share

PAUSE_S, PAUSE_LIMIT_S = 10.0, 360.0
"""Seconds before a failed pod is replaced: doubled with each failure, up to a limit."""


class JobController:
    """Runs Jobs; time passes ``speed`` times as fast for the pauses between tries."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed

    async def reconcile(self, objects: ClusterObjects) -> None:
        """Take every Job one step on."""
        for job in objects.all("Job"):
            if not deleting(job):
                await self._step_job(objects, job)

    async def _step_job(self, objects: ClusterObjects, job: JsonObject) -> None:
        spec, status, now = job["spec"], job.get("status") or {}, time.time()
        ended = [each for each in status.get("conditions") or () if each["type"] in ("Complete", "Failed")]
        if ended:
            lifetime = spec.get("ttlSecondsAfterFinished")
            if lifetime is not None and now - seconds_of(ended[0]["lastTransitionTime"]) >= lifetime / self._speed:
                await objects.delete(job, propagation="Background")
            return
        pods = objects.owned("Pod", job)
        running = [pod for pod in pods if active(pod)]
        done = sum(phase(pod) == "Succeeded" for pod in pods)
        failed = [pod for pod in pods if phase(pod) == "Failed"]
        wanted = spec.get("completions") or 1
        restarts = sum(
            each.get("restartCount", 0)
            for pod in running
            for each in pod.get("status", {}).get("containerStatuses", ())
        )
        changes: JsonObject = {"startTime": status.get("startTime") or timestamp(now)}
        limit, deadline = spec.get("backoffLimit", 6), spec.get("activeDeadlineSeconds")
        if done >= wanted:
            changes |= {"conditions": with_condition(job, "Complete", True, "CompletionsReached")}
            changes |= {"completionTime": timestamp(now)}
        elif len(failed) + restarts > limit:
            message = "Job has reached the specified backoff limit"
            changes |= {"conditions": with_condition(job, "Failed", True, "BackoffLimitExceeded", message)}
        elif deadline is not None and now - seconds_of(changes["startTime"]) >= deadline:
            message = "Job was active longer than specified deadline"
            changes |= {"conditions": with_condition(job, "Failed", True, "DeadlineExceeded", message)}
        elif not spec.get("suspend") and now >= self._next_try(failed):
            for _ in range(min(spec.get("parallelism", 1), wanted - done) - len(running)):
                await objects.create(_pod_of_job(job))
        if "conditions" in changes:
            for pod in running:
                await objects.delete(pod)
            running = []
        changes |= {"active": len(running), "ready": sum(map(ready, running))}
        changes |= {"succeeded": done, "failed": len(failed)}
        await objects.set_status(job, changes)

    def _next_try(self, failed: list[JsonObject]) -> float:
        if not failed:
            return 0.0
        latest = max(seconds_of(pod["metadata"]["creationTimestamp"]) for pod in failed)
        return latest + float(min(PAUSE_LIMIT_S, PAUSE_S * 2 ** (len(failed) - 1))) / self._speed


def _pod_of_job(job: JsonObject) -> JsonObject:
    name, uid = name_of(job)[1], job["metadata"]["uid"]
    labels = {"job-name": name, "batch.kubernetes.io/job-name": name}
    labels |= {"controller-uid": uid, "batch.kubernetes.io/controller-uid": uid}
    return pod_of(job, job["spec"]["template"], f"{name}-{suffix()}", labels)


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


SERVICE_LABEL = "kubernetes.io/service-name"
MANAGED_BY = {"endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}


async def reconcile_endpoints(objects: ClusterObjects) -> None:
    """Write the endpoints of every Service that selects pods."""
    for service in objects.all("Service"):
        if service["spec"].get("selector") and not deleting(service):
            await _write(objects, service)


async def _write(objects: ClusterObjects, service: JsonObject) -> None:
    namespace, name = name_of(service)
    selector = {"matchLabels": service["spec"]["selector"]}
    pods = [
        pod
        for pod in objects.all("Pod", namespace)
        if matches(selector, pod["metadata"].get("labels"))
        and (pod.get("status") or {}).get("podIP")
        and phase(pod) not in ("Succeeded", "Failed")
    ]
    pods.sort(key=name_of)
    always = bool(service["spec"].get("publishNotReadyAddresses"))
    slice_body = {
        "addressType": "IPv4",
        "endpoints": [_endpoint(pod, always, service) for pod in pods],
        "ports": [_port(each, pods) for each in service["spec"].get("ports") or ()],
    }
    labels = {**(service["metadata"].get("labels") or {}), SERVICE_LABEL: name}
    present = objects.owned("EndpointSlice", service)
    metadata = {"namespace": namespace, "ownerReferences": [owner_reference(service)], "labels": labels | MANAGED_BY}
    if not present:
        slice_name = {"name": f"{name}-{suffix()}"}
        head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata | slice_name}
        await objects.create({**head, **slice_body})
    elif any(present[0].get(key) != value for key, value in slice_body.items()):
        await objects.merge(present[0], slice_body)
    usable = [pod for pod in pods if always or (ready(pod) and not deleting(pod))]
    waiting = [pod for pod in pods if pod not in usable and not deleting(pod)]
    parts: JsonObject = {"addresses": [_address(pod) for pod in usable]} if usable else {}
    parts |= {"notReadyAddresses": [_address(pod) for pod in waiting]} if waiting else {}
    subsets = [{**parts, "ports": slice_body["ports"]}] if parts else []
    endpoints = objects.get("Endpoints", namespace, name)
    if endpoints is None:
        metadata = {"name": name, "namespace": namespace, "labels": service["metadata"].get("labels") or {}}
        await objects.create({"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets})
    elif (endpoints.get("subsets") or []) != subsets:
        await objects.merge(endpoints, {"subsets": subsets})


def _endpoint(pod: JsonObject, always: bool, service: JsonObject) -> JsonObject:
    endpoint = {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {
            "ready": always or (ready(pod) and not deleting(pod)),
            "serving": ready(pod),
            "terminating": deleting(pod),
        },
        "nodeName": pod["spec"].get("nodeName"),
        "targetRef": _reference(pod),
    }
    named = pod["spec"].get("hostname") and pod["spec"].get("subdomain") == service["metadata"]["name"]
    return endpoint | ({"hostname": pod["spec"]["hostname"]} if named else {})


def _address(pod: JsonObject) -> JsonObject:
    return {"ip": pod["status"]["podIP"], "nodeName": pod["spec"].get("nodeName"), "targetRef": _reference(pod)}


def _reference(pod: JsonObject) -> JsonObject:
    namespace, name = name_of(pod)
    return {"kind": "Pod", "namespace": namespace, "name": name, "uid": pod["metadata"]["uid"]}


def _port(port: JsonObject, pods: list[JsonObject]) -> JsonObject:
    """Return a service's port as its pods have it: a name stands for the number in their containers."""
    target = port.get("targetPort") or port["port"]
    numbers = [
        each["containerPort"]
        for pod in pods
        for container in (*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or ()))
        for each in container.get("ports") or ()
        if each.get("name") == target
    ]
    number = target if isinstance(target, int) else (numbers or [port["port"]])[0]
    made = {"name": port.get("name") or "", "port": number, "protocol": port.get("protocol") or "TCP"}
    return made | ({"appProtocol": port["appProtocol"]} if port.get("appProtocol") else {})


FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
"""Finalizers with which the API server leaves the deletion to this controller."""


async def collect_garbage(objects: ClusterObjects) -> None:
    """Delete what has no owner any more, and do what deletions in the foreground wait for."""
    everything = list(objects.everything())
    uids = {item["metadata"]["uid"] for item in everything}
    dependents = defaultdict(list)
    for item in everything:
        for owner in item["metadata"].get("ownerReferences") or ():
            dependents[owner["uid"]].append(item)
    for item in everything:
        finalizers = item["metadata"].get("finalizers") or ()
        if deleting(item) and ORPHAN in finalizers:
            for each in dependents[item["metadata"]["uid"]]:
                await _disown(objects, each, {item["metadata"]["uid"]})
            await _release(objects, item, ORPHAN)
        elif deleting(item) and FOREGROUND in finalizers:
            await _foreground(objects, item, dependents[item["metadata"]["uid"]])
        elif not deleting(item):
            await _ownerless(objects, item, uids)


async def _ownerless(objects: ClusterObjects, item: JsonObject, uids: set[str]) -> None:
    owners = item["metadata"].get("ownerReferences") or ()
    missing = [owner for owner in owners if owner["uid"] not in uids]
    if not missing:
        return
    absent = {owner["uid"] for owner in missing if await _absent(objects, item, owner)}
    if len(absent) == len(owners):
        await objects.delete(item, propagation="Background")
    elif absent:
        await _disown(objects, item, absent)


async def _absent(objects: ClusterObjects, item: JsonObject, owner: JsonObject) -> bool:
    """Return whether an owner is not there: the cache may not have it yet, so the API server is asked."""
    try:
        space = item["metadata"].get("namespace") or ""
        there = await objects.current(owner["apiVersion"], owner["kind"], space, owner["name"])
    except LookupError:
        return False  # a kind that is not served now may be served again
    return there is None or there["metadata"]["uid"] != owner["uid"]


async def _disown(objects: ClusterObjects, item: JsonObject, uids: set[str]) -> None:
    owners = [owner for owner in item["metadata"].get("ownerReferences") or () if owner["uid"] not in uids]
    await objects.merge(item, {"metadata": {"ownerReferences": owners or None}})


async def _foreground(objects: ClusterObjects, item: JsonObject, dependents: list[JsonObject]) -> None:
    uid = item["metadata"]["uid"]
    there = [each for each in dependents if objects.get(each["kind"], *name_of(each)) is not None]
    for each in there:
        if not deleting(each):
            await objects.delete(each, propagation="Foreground")
    blocking = [
        each
        for each in there
        if any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in each["metadata"]["ownerReferences"])
    ]
    if not any(objects.get(each["kind"], *name_of(each)) for each in blocking):
        await _release(objects, item, FOREGROUND)


async def _release(objects: ClusterObjects, item: JsonObject, finalizer: str) -> None:
    left = [each for each in item["metadata"].get("finalizers") or () if each != finalizer]
    await objects.merge(item, {"metadata": {"finalizers": left or None}})
