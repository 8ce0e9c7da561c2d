"""Fields that the API server fills in itself: addresses, selectors of Jobs, first statuses, what updates leave out."""

import random
from ipaddress import ip_network

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.kind_defaults import NODE_PORTS, filled

_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def allocated(kind: str, item: JsonObject, timestamp: str, rng: random.Random, services: str) -> JsonObject:
    """Return a new object of a built-in kind with what its server gives it."""
    match kind:
        case "Pod":
            return _pod(item)
        case "Service":
            return item | {"spec": _service(item["spec"], rng, services)}
        case "Job":
            return item | {"spec": _job(item)}
        case "CustomResourceDefinition":
            return item | {"status": definition_status(item, timestamp)}
        case "PersistentVolumeClaim":
            return item | {"status": {"phase": "Pending"}}
    return item


def carried_over(kind: str, before: JsonObject, item: JsonObject) -> JsonObject:
    """Return a changed object with what an update may leave out."""
    match kind:
        case "Service":
            spec, old = item["spec"], before["spec"]
            if spec.get("type") != "ExternalName":
                spec = {name: old[name] for name in ("clusterIP", "clusterIPs") if name in old} | spec
            ports = {each["port"]: each["nodePort"] for each in old.get("ports") or [] if "nodePort" in each}
            if spec.get("type") in ("NodePort", "LoadBalancer"):
                spec["ports"] = [
                    ({"nodePort": ports[each["port"]]} if each["port"] in ports else {}) | each
                    for each in spec["ports"]
                ]
            return item | {"spec": spec}
        case "Job":
            return item | {"spec": {"selector": before["spec"]["selector"]} | item["spec"]}
        case "CustomResourceDefinition":
            status = item.get("status") or {}
            return item | {"status": status | {"acceptedNames": item["spec"]["names"]}}
    return item


def _pod(item: JsonObject) -> JsonObject:
    tolerations = list(item["spec"].get("tolerations") or [])
    for key in _TOLERATED:
        if not any(each.get("key") in (None, key) for each in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    defaults: JsonObject = {"serviceAccountName": "default", "enableServiceLinks": True, "priority": 0}
    defaults |= {"preemptionPolicy": "PreemptLowerPriority"}
    spec = filled(item["spec"], defaults) | {"tolerations": tolerations}
    spec["serviceAccount"] = spec["serviceAccountName"]
    resources = [each.get("resources") or {} for each in spec.get("containers") or []]
    quality = "Burstable" if any(each.get("requests") or each.get("limits") for each in resources) else "BestEffort"
    if resources and all(
        each.get("limits") and each.get("requests", each["limits"]) == each["limits"] for each in resources
    ):
        quality = "Guaranteed"
    return item | {"spec": spec, "status": {"phase": "Pending", "qosClass": quality}}


def _service(spec: JsonObject, rng: random.Random, services: str) -> JsonObject:
    if spec["type"] == "ExternalName":
        return spec
    if not spec.get("clusterIP"):
        network = ip_network(services)
        spec = spec | {"clusterIP": str(network[rng.randint(2, network.num_addresses - 2)])}
    spec = spec | {"clusterIPs": [spec["clusterIP"]]}
    if spec["type"] in ("NodePort", "LoadBalancer"):
        spec["ports"] = [{"nodePort": NODE_PORTS + rng.randint(0, 2767)} | each for each in spec.get("ports") or []]
    return spec


def _job(item: JsonObject) -> JsonObject:
    spec: JsonObject = item["spec"]
    uid, name = item["metadata"]["uid"], item["metadata"]["name"]
    if spec.get("manualSelector") or "template" not in spec:
        return spec
    labels = {"batch.kubernetes.io/controller-uid": uid, "controller-uid": uid}
    names = {"batch.kubernetes.io/job-name": name, "job-name": name}
    template = spec["template"]
    metadata = template.get("metadata") or {}
    template = template | {"metadata": metadata | {"labels": (metadata.get("labels") or {}) | labels | names}}
    selector = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    return spec | {"selector": selector, "template": template}


def definition_status(item: JsonObject, timestamp: str) -> JsonObject:
    """Return the status of a CRD whose kinds are served."""
    conditions = [
        {"type": kind, "status": "True", "reason": reason, "message": text, "lastTransitionTime": timestamp}
        for kind, reason, text in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    stored = [each["name"] for each in item["spec"].get("versions") or [] if each.get("storage")]
    return {"conditions": conditions, "acceptedNames": item["spec"]["names"], "storedVersions": stored}
