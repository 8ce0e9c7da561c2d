"""Endpoints controller: the ready pods of each Service, as EndpointSlices and as Endpoints."""

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import (
    ClusterObjects,
    deleting,
    name_of,
    owner_reference,
)
from tests.doubles.kubernetes.controllers.owned_pods import matches, phase, ready, suffix

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
