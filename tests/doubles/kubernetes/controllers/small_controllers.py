"""Controllers of Services' endpoints, and of what has no owner any more."""

from collections import defaultdict

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    deleting,
    matches,
    name_of,
    owner_reference,
    phase,
    ready,
    suffix,
)

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


def _reference(pod: JsonObject) -> JsonObject:
    namespace, name = name_of(pod)
    return {"kind": "Pod", "namespace": namespace, "name": name, "uid": pod["metadata"]["uid"]}


def _port(port: JsonObject, pods: list[JsonObject]) -> JsonObject:
    """Return a service's port as its pods have it: a name stands for the number in their containers."""
    target = port.get("targetPort") or port["port"]
    numbers = [
        each["containerPort"]
        for pod in pods
        for container in pod["spec"]["containers"]
        for each in container.get("ports") or ()
        if each.get("name") == target
    ]
    number = target if isinstance(target, int) else (numbers or [port["port"]])[0]
    made = {"name": port.get("name") or "", "port": number, "protocol": port.get("protocol") or "TCP"}
    return made | ({"appProtocol": port["appProtocol"]} if port.get("appProtocol") else {})


FOREGROUND = "foregroundDeletion"
"""Finalizer with which the API server leaves the deletion to this controller."""


async def collect_garbage(objects: ClusterObjects) -> None:
    """Delete what has no owner any more, and do what deletions in the foreground wait for."""
    everything = list(objects.everything())
    uids = {item["metadata"]["uid"] for item in everything}
    dependents = defaultdict(list)
    for item in everything:
        for owner in item["metadata"].get("ownerReferences") or ():
            dependents[owner["uid"]].append(item)
    for item in everything:
        if deleting(item) and FOREGROUND in (item["metadata"].get("finalizers") or ()):
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
        left = [owner for owner in owners if owner["uid"] not in absent]
        await objects.merge(item, {"metadata": {"ownerReferences": left}})


async def _absent(objects: ClusterObjects, item: JsonObject, owner: JsonObject) -> bool:
    """Return whether an owner is not there: the cache may not have it yet, so the API server is asked."""
    try:
        space = item["metadata"].get("namespace") or ""
        there = await objects.current(owner["apiVersion"], owner["kind"], space, owner["name"])
    except LookupError:
        return False  # a kind that is not served now may be served again
    return there is None or there["metadata"]["uid"] != owner["uid"]


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
        left = [each for each in item["metadata"]["finalizers"] if each != FOREGROUND]
        await objects.merge(item, {"metadata": {"finalizers": left or None}})
