"""Pods of a cluster: of engines, frontends and the planner, each with one container of ours."""

import hashlib
import json
import sys
from collections.abc import Mapping

from penstock.adapters.connectors.engine_process import LaunchSpec
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock.runtime.records.pod_run_folder import POD_ENV
from penstock_kubernetes.operator.cluster_spec import RUNS, ClusterSpec, merge
from penstock_kubernetes.operator.object_names import CONTAINER, object_name
from penstock_kubernetes.pod_launch import PORT

CONFIG_DIR = "/etc/penstock"
GPU = "nvidia.com/gpu"
PROXY_PAUSE = 5
"""Seconds for which a frontend that is to end still accepts: proxies on all nodes learn so late that it leaves."""
PAUSE = [sys.executable, "-c", f"import time; time.sleep({PROXY_PAUSE})"]
"""As a program: the hook that sleeps by itself is younger than many clusters."""
OURS = "penstock"
"""Image of frontends, planner and simulated engines."""
SECRET_KEY, ADMIN_KEY = "cluster-secret", "admin-key"
ADMIN_ENV = "PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS"


def engine_pod(
    cluster: str, spec: ClusterSpec, name: str, pool: PoolSettings, launch: LaunchSpec, gpus: int, image: str
) -> JsonObject:
    """Return the template of an engine's pod.

    Args:
        name: of its pool.
        image: the operator's own.
    Raises:
        ConfigError: the spec names no image for engines of this kind.
    """
    supervise = spec.settings.supervise
    hosts = spec.kubernetes.hosts.get(name, 1)
    container: JsonObject = {
        "name": CONTAINER,
        "image": image_of(spec, pool.engine, image),
        "command": [launch.argv[0]],
        "args": list(launch.argv[1:]),
        "env": [
            *_own_env(cluster, with_secret=pool.engine == "sim", engine=True),
            *({"name": key, "value": value} for key, value in launch.env.items()),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 3},
        "resources": {"limits": {GPU: gpus // hosts}} if gpus else {},
    }
    pod: JsonObject = {
        # A new pod replaces an ended one: the fleet counts, backs off, and tells why.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # For a pod that others end, such as by draining a node: as long as its requests may take.
        "terminationGracePeriodSeconds": round(supervise.drain_timeout + supervise.stop_grace),
        "containers": [_with_secrets(container, spec)],
    }
    if gpus:
        pod = with_shared_memory(pod)
    if pool.engine == "sim":
        pod |= _locked_down(pod)
    return _merged(spec, name, pod)


def process_pod(cluster: str, spec: ClusterSpec, component: str, words: list[str], image: str) -> JsonObject:
    """Return the template of a frontend's or the planner's pod, which makes its run folder from the mounted config."""
    supervise, port = spec.settings.supervise, spec.settings.frontend.port
    frontend = component == "frontend"
    container: JsonObject = {
        "name": CONTAINER,
        "image": image_of(spec, OURS, image),
        "command": [sys.executable],
        "args": ["-m", *words, "--config", f"{CONFIG_DIR}/config.yaml"],
        "env": [*_own_env(cluster, with_secret=True), _secret_env(cluster, ADMIN_ENV, ADMIN_KEY)],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "run", "mountPath": RUNS},
        ],
    }
    if frontend:
        container |= {
            "ports": [{"name": "http", "containerPort": port}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2},
            "lifecycle": {"preStop": {"exec": {"command": PAUSE}}},
        }
    grace = supervise.stop_grace + (supervise.drain_timeout + PROXY_PAUSE if frontend else 0)
    pod: JsonObject = {
        "serviceAccountName": object_name(cluster, "cluster"),
        # A Service named penstock would put PENSTOCK_PORT into the environment, which is no setting of ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(grace),
        "containers": [_with_secrets(container, spec)],
        "volumes": [
            {"name": "config", "configMap": {"name": object_name(cluster, "config")}},
            {"name": "run", "emptyDir": {}},
        ],
    }
    return _merged(spec, component, pod | _locked_down(pod))


def with_shared_memory(pod: JsonObject) -> JsonObject:
    """Return a pod whose containers share the node's memory: processes of one engine need more than 64 MB of it."""
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    containers = [{**each, "volumeMounts": [*each.get("volumeMounts", []), mount]} for each in pod["containers"]]
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return {**pod, "containers": containers, "volumes": [*pod.get("volumes", []), volume]}


def image_of(spec: ClusterSpec, kind: str, own: str) -> str:
    """Return the image for engines of a kind, or for our own processes.

    Raises:
        ConfigError: none is named.
    """
    kind = OURS if kind == "sim" else kind
    image = spec.kubernetes.images.get(kind) or (own if kind == OURS else None)
    if not image:
        raise ConfigError(f"there is no image for {kind}", hint=f"set spec.kubernetes.images.{kind}")
    return image


def template_hash(template: Mapping[str, object]) -> str:
    """Return a short digest of a template, by which pods of an older one are known."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:12]


def _own_env(cluster: str, *, with_secret: bool, engine: bool = False) -> list[JsonObject]:
    fields = {"POD_IP": "status.podIP", POD_ENV: "metadata.name"}
    if not engine:  # so that its leases in the store go with it
        fields |= {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    env: list[JsonObject] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    return [*env, _secret_env(cluster, SECRET_ENV, SECRET_KEY)] if with_secret else env


def _secret_env(cluster: str, name: str, key: str) -> JsonObject:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": object_name(cluster, "secret"), "key": key}}}


def _with_secrets(container: JsonObject, spec: ClusterSpec) -> JsonObject:
    name = spec.kubernetes.secrets
    return container if name is None else {**container, "envFrom": [{"secretRef": {"name": name}}]}


def _locked_down(pod: JsonObject) -> JsonObject:
    """Return what our own image needs no more of: no root, no capabilities, nothing to write but its run folder."""
    limits = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{**container, "securityContext": limits} for container in pod["containers"]],
    }


def _merged(spec: ClusterSpec, name: str, pod: JsonObject) -> JsonObject:
    return merge({"metadata": {}, "spec": pod}, spec.kubernetes.pod_templates.get(name, {}))
