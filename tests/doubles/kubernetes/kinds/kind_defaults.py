"""Defaults of built-in kinds: what the API server fills into an object that says nothing of it."""

import base64
import random
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

from penstock.kernel.values import JsonObject

_ROLLING: JsonObject = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}
SPEC: dict[str, JsonObject] = {
    "Deployment": {"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600},
    "ReplicaSet": {"replicas": 1},
    "StatefulSet": {"replicas": 1, "podManagementPolicy": "OrderedReady", "serviceName": ""},
    "Service": {"type": "ClusterIP", "sessionAffinity": "None"},
    "CustomResourceDefinition": {"conversion": {"strategy": "None"}},
}
POD: JsonObject = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "securityContext": {},
}
CONTAINER: JsonObject = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "resources": {},
}
PROBE: JsonObject = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}


def filled(item: Any, defaults: JsonObject) -> JsonObject:
    """Return an object with defaults for what it leaves out, in its parts, too."""
    result = dict(item or {})
    for name, value in defaults.items():
        if name not in result:
            result[name] = value
        elif isinstance(value, dict) and isinstance(result[name], dict):
            result[name] = filled(result[name], value)
    return result


def with_defaults(kind: str, item: JsonObject) -> JsonObject:
    """Return an object of a built-in kind with the defaults that depend on nothing but itself."""
    if defaults := SPEC.get(kind):
        item = item | {"spec": filled(item.get("spec"), defaults)}
    if kind in _SPECIAL:
        item = _SPECIAL[kind](item)
    spec = item.get("spec") or {}
    if kind == "Pod" and "spec" in item:
        item = item | {"spec": pod_defaults(spec)}
    elif "template" in spec and kind in SPEC:
        item = item | {"spec": spec | {"template": _template(spec["template"])}}
    return item


def pod_defaults(spec: JsonObject) -> JsonObject:
    """Return the spec of a pod or of a pod template with its defaults."""
    spec = filled(spec, POD)
    spec["containers"] = [_container(each) for each in spec.get("containers") or []]
    if "volumes" in spec:
        spec["volumes"] = [_volume(each) for each in spec["volumes"]]
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    return spec


def _template(template: JsonObject) -> JsonObject:
    metadata = {name: value for name, value in (template.get("metadata") or {}).items() if name != "creationTimestamp"}
    return template | {"metadata": metadata, "spec": pod_defaults(template.get("spec") or {})}


def _container(container: JsonObject) -> JsonObject:
    container = filled(container, CONTAINER)
    tag = container.get("image", "").rpartition("/")[2].partition("@")[0].partition(":")[2]
    container.setdefault("imagePullPolicy", "Always" if tag in ("", "latest") else "IfNotPresent")
    if "ports" in container:
        container["ports"] = [filled(each, {"protocol": "TCP"}) for each in container["ports"]]
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in container:
            container[name] = filled(container[name], PROBE)
            if "httpGet" in container[name]:
                container[name]["httpGet"] = filled(container[name]["httpGet"], {"path": "/", "scheme": "HTTP"})
    for index, each in enumerate(container.get("env") or []):
        reference = (each.get("valueFrom") or {}).get("fieldRef")
        if reference and "apiVersion" not in reference:
            whole = each | {"valueFrom": {"fieldRef": {"apiVersion": "v1"} | reference}}
            container["env"] = [*container["env"][:index], whole, *container["env"][index + 1 :]]
    return container


def _volume(volume: JsonObject) -> JsonObject:
    sources = {name: filled(volume[name], {"defaultMode": 420}) for name in ("configMap", "secret") if name in volume}
    return volume | sources


def _deployment(item: JsonObject) -> JsonObject:
    strategy = item["spec"].get("strategy") or {}
    strategy = filled(strategy, _ROLLING) if strategy.get("type", "RollingUpdate") == "RollingUpdate" else strategy
    return item | {"spec": item["spec"] | {"strategy": strategy}}


def _service_defaults(item: JsonObject) -> JsonObject:
    spec = item["spec"]
    spec = filled(spec, {"internalTrafficPolicy": "Cluster", "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"})
    ports = [filled(each, {"protocol": "TCP", "targetPort": each.get("port")}) for each in spec.get("ports") or []]
    return item | {
        "spec": spec | ({"ports": ports} if ports else {}),
        "status": item.get("status") or {"loadBalancer": {}},
    }


def _secret(item: JsonObject) -> JsonObject:
    item = filled(item, {"type": "Opaque"})
    if texts := item.pop("stringData", None):
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
        item["data"] = (item.get("data") or {}) | encoded
    return item


def _namespace(item: JsonObject) -> JsonObject:
    metadata = item["metadata"]
    labels = (metadata.get("labels") or {}) | {"kubernetes.io/metadata.name": metadata.get("name", "")}
    item = item | {"metadata": metadata | {"labels": labels}}
    return filled(item, {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}})


def _binding(item: JsonObject) -> JsonObject:
    group = "rbac.authorization.k8s.io"
    subjects = [
        each if each.get("kind") == "ServiceAccount" else filled(each, {"apiGroup": group})
        for each in item.get("subjects") or []
    ]
    item = item | ({"subjects": subjects} if subjects else {})
    return item | {"roleRef": filled(item.get("roleRef"), {"apiGroup": group})}


def _definition(item: JsonObject) -> JsonObject:
    names = item["spec"].get("names") or {}
    defaults = {"singular": names.get("kind", "").lower(), "listKind": f"{names.get('kind')}List"}
    return item | {"spec": item["spec"] | {"names": filled(names, defaults)}}


def _endpoint_slice(item: JsonObject) -> JsonObject:
    return item | {"ports": [filled(each, {"name": "", "protocol": "TCP"}) for each in item.get("ports") or []]}


_SPECIAL: dict[str, Callable[[JsonObject], JsonObject]] = {
    "Deployment": _deployment,
    "Service": _service_defaults,
    "Secret": _secret,
    "Namespace": _namespace,
    "RoleBinding": _binding,
    "ClusterRoleBinding": _binding,
    "CustomResourceDefinition": _definition,
    "EndpointSlice": _endpoint_slice,
}


def allocated(kind: str, item: JsonObject, timestamp: str, rng: random.Random, services: str) -> JsonObject:
    """Return a new object of a built-in kind with what its server gives it."""
    match kind:
        case "Pod":
            return _pod_fields(item)
        case "Service":
            return item | {"spec": _service_addresses(item["spec"], rng, services)}
        case "CustomResourceDefinition":
            return item | {"status": definition_status(item, timestamp)}
    return item


def carried_over(kind: str, before: JsonObject, item: JsonObject) -> JsonObject:
    """Return a changed object with what an update may leave out."""
    match kind:
        case "Service":
            addresses = {name: before["spec"][name] for name in ("clusterIP", "clusterIPs") if name in before["spec"]}
            return item | {"spec": addresses | item["spec"]}
        case "CustomResourceDefinition":
            status = item.get("status") or {}
            return item | {"status": status | {"acceptedNames": item["spec"]["names"]}}
    return item


def _pod_fields(item: JsonObject) -> JsonObject:
    defaults: JsonObject = {"serviceAccountName": "default", "enableServiceLinks": True, "priority": 0}
    defaults |= {"preemptionPolicy": "PreemptLowerPriority"}
    spec = filled(item["spec"], defaults)
    spec["serviceAccount"] = spec["serviceAccountName"]
    return item | {"spec": spec, "status": {"phase": "Pending"}}


def _service_addresses(spec: JsonObject, rng: random.Random, services: str) -> JsonObject:
    if not spec.get("clusterIP"):
        network = ip_network(services)
        spec = spec | {"clusterIP": str(network[rng.randint(2, network.num_addresses - 2)])}
    return spec | {"clusterIPs": [spec["clusterIP"]]}


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
