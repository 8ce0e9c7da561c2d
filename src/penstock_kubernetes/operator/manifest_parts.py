"""Manifest parts: builds the objects that the operator applies and `penstock render` prints, their pods, containers."""

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.object_names import owner_reference, selector

CONFIG_DIR = "/etc/penstock"
RUNS = "/run/penstock"
"""Where pods keep their run folders: an emptyDir, so that the root file system is read-only."""
GPU = "nvidia.com/gpu"
RBAC = "rbac.authorization.k8s.io"
NO_LINKS: JsonObject = {"enableServiceLinks": False}
"""A Service named penstock would put PENSTOCK_PORT and the like into the environment, which are no settings of ours."""
LOCKED: JsonObject = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""What a container of our own image needs no more of."""
NOBODY: JsonObject = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
"""The same of its pod."""


class Manifests(NamedTuple):
    """Builds the objects of one cluster.

    Args:
        cluster: its name.
        resource: the PenstockCluster that owns them; None: whoever applies them does, in the namespace of their own.
    """

    cluster: str
    resource: JsonObject | None = None

    def made(self, version: str, kind: str, name: str, *, component: str = "cluster", **fields: object) -> JsonObject:
        """Return an object with its name and labels; ``fields`` are those beside its metadata."""
        metadata: JsonObject = {"name": name, "labels": selector(self.cluster, component)}
        if self.resource is not None:
            metadata["namespace"] = self.resource["metadata"]["namespace"]
            metadata["ownerReferences"] = [owner_reference(self.resource)]
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}

    def rights(self, name: str, rules: list[JsonObject]) -> list[JsonObject]:
        """Return an account, what it may do, and that it may."""
        role = {"apiGroup": RBAC, "kind": "Role", "name": name}
        account = [{"kind": "ServiceAccount", "name": name}]
        return [
            self.made("v1", "ServiceAccount", name),
            self.made(f"{RBAC}/v1", "Role", name, rules=rules),
            self.made(f"{RBAC}/v1", "RoleBinding", name, roleRef=role, subjects=account),
        ]

    def service(self, name: str, port: int, **fields: object) -> JsonObject:
        """Return the Service of the frontends."""
        ports = [{"name": "http", "port": port, "targetPort": "http", **fields}]
        spec = {"selector": selector(self.cluster, "frontend"), "ports": ports}
        return self.made("v1", "Service", name, component="frontend", spec=spec)

    def deployment(
        self, name: str, component: str, template: JsonObject, *, labels: Mapping[str, str] | None = None, **how: object
    ) -> JsonObject:
        """Return a Deployment.

        Args:
            template: of its pods, with or without metadata.
            labels: beside those of its component, which select its pods.
            how: fields of its spec, such as replicas and strategy.
        """
        labels = {**selector(self.cluster, component), **(labels or {})}
        metadata = template["metadata"]
        metadata = {**metadata, "labels": {**(metadata.get("labels") or {}), **labels}}
        spec = {
            **how,
            "selector": {"matchLabels": labels},
            "template": {"metadata": metadata, "spec": template["spec"]},
        }
        return self.made("apps/v1", "Deployment", name, component=component, spec=spec)


def plain_env(values: Mapping[str, str]) -> list[JsonObject]:
    return [{"name": name, "value": value} for name, value in values.items()]


def field_env(paths: Mapping[str, str]) -> list[JsonObject]:
    """Return environment that a pod has from its own object."""
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths.items()]


def secret_env(name: str, secret: str, key: str) -> JsonObject:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def http_port(port: int) -> JsonObject:
    """Return the part of a container that names the port which its probes ask."""
    return {"ports": [{"name": "http", "containerPort": port}]}


def http_probe(path: str = "/health", **fields: int) -> JsonObject:
    return {"httpGet": {"path": path, "port": "http"}, **fields}


def config_mounts(**folders: str) -> list[JsonObject]:
    """Return mounts of a container of ours: its config, and folders that it may write, by their volumes' names."""
    config = {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}
    return [config, *({"name": name, "mountPath": path} for name, path in folders.items())]


def config_volumes(config_map: str, *folders: str) -> list[JsonObject]:
    """Return the volumes of `config_mounts`."""
    return [
        {"name": "config", "configMap": {"name": config_map}},
        *({"name": name, "emptyDir": {}} for name in folders),
    ]


def with_shared_memory(pod: JsonObject) -> JsonObject:
    """Return a pod whose containers share the node's memory: processes of one engine need more than 64 MB of it."""
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    containers = [{**each, "volumeMounts": [*each.get("volumeMounts", []), mount]} for each in pod["containers"]]
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return {**pod, "containers": containers, "volumes": [*pod.get("volumes", []), volume]}


def locked_down(pod: JsonObject) -> JsonObject:
    """Return a pod of our own image: no root, no capabilities, nothing to write but its run folder."""
    containers = [{**container, "securityContext": LOCKED} for container in pod["containers"]]
    return {**pod, "securityContext": NOBODY, "containers": containers}


def template_hash(template: Mapping[str, object]) -> str:
    """Return a short digest of a template, by which pods of an older one are known."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:12]
