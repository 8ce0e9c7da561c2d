"""Objects of a cluster for the connector's tests: definitions of others' resources, and one object of each kind."""

from typing import Any

from lightkube import AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.apps_v1 import Deployment, StatefulSet
from lightkube.resources.core_v1 import Pod

from penstock.kernel.values import JsonObject

GRAPHS, ADAPTERS = "dynamographdeployments", "dynamographdeploymentscalingadapters"
LWS_GROUP, OWN_GROUP, NVIDIA = "leaderworkerset.x-k8s.io", "penstock.io", "nvidia.com"


async def define(client: AsyncClient, group: str, kind: str, plural: str, *versions: str, scale: bool = False) -> None:
    """Create the definition of a resource whose spec and status may be anything."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}}
    subresources: JsonObject = {"status": {}}
    if scale:
        paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
        subresources["scale"] = paths
    served = [
        {"name": name, "served": True, "storage": not n, "schema": schema, "subresources": subresources}
        for n, name in enumerate(versions)
    ]
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": served}
    await client.create(CustomResourceDefinition.from_dict({"metadata": {"name": f"{plural}.{group}"}, "spec": spec}))


async def put(client: AsyncClient, group: str, version: str, kind: str, plural: str, name: str, **rest: Any) -> Any:
    """Create an object of a defined resource."""
    resource = create_namespaced_resource(group, version, kind, plural)
    body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name}, **rest}
    await client.create(resource(body))
    return resource


def container(gpus: int | None = None) -> JsonObject:
    own: JsonObject = {"name": "main", "image": "vllm/vllm-openai"}
    return own if gpus is None else {**own, "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}


def workload(kind: Any, name: str, replicas: int, *, gpus: int | None = None) -> Any:
    """Return a Deployment or StatefulSet whose pods have the label app=NAME."""
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container(gpus)]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    if kind is StatefulSet:
        spec["serviceName"] = name
    return kind.from_dict({"metadata": {"name": name}, "spec": spec})


def pod(name: str, labels: dict[str, str], **status: Any) -> Pod:
    """Return a pod with a status, which a test writes as the kubelet would."""
    return Pod.from_dict(
        {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container()]}, "status": status}
    )


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
PENDING = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}],
}
CRASHING = {
    "phase": "Running",
    "containerStatuses": [
        {
            "name": "main",
            "image": "v",
            "imageID": "",
            "ready": False,
            "restartCount": 4,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        }
    ],
}


def graph_alpha(**services: JsonObject) -> JsonObject:
    return {"services": services}


def graph_beta(*components: JsonObject) -> JsonObject:
    return {"components": list(components)}


def service_alpha(role: str | None, replicas: int, *, gpus: str | None = None, model: str | None = None) -> JsonObject:
    """Return a service as v1alpha1 has it."""
    fields: JsonObject = {"componentType": "worker", "replicas": replicas}
    if role is not None:
        fields["subComponentType"] = role
    if gpus is not None:
        fields["resources"] = {"limits": {"gpu": gpus}}
    if model is not None:
        fields["extraPodSpec"] = {"mainContainer": {"args": ["--model", "org/weights", "--served-model-name", model]}}
    return fields


def component_beta(name: str, role: str, replicas: int, *, gpus: int | None = None) -> JsonObject:
    """Return a component as v1beta1 has it."""
    template = {"spec": {"containers": [container(gpus)]}}
    return {"name": name, "type": role, "replicas": replicas, "podTemplate": template}


__all__ = ["Deployment", "StatefulSet"]
