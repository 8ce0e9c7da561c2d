"""Pods of a cluster: of engines, frontends and the planner, each with one container of ours."""

import sys

from penstock.adapters.connectors.engine_process import LaunchSpec
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock.runtime.records.pod_run_folder import POD_ENV
from penstock_kubernetes.operator.cluster_spec import ClusterSpec, merge
from penstock_kubernetes.operator.manifest_parts import (
    CONFIG_DIR,
    GPU,
    NO_LINKS,
    RUNS,
    config_mounts,
    config_volumes,
    field_env,
    http_port,
    http_probe,
    locked_down,
    plain_env,
    secret_env,
    with_shared_memory,
)
from penstock_kubernetes.operator.object_names import CONTAINER, object_name
from penstock_kubernetes.pod_launch import PORT

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
        "env": [*_own_env(cluster, with_secret=pool.engine == "sim", engine=True), *plain_env(launch.env)],
        **http_port(PORT),
        "readinessProbe": http_probe(periodSeconds=5, timeoutSeconds=3),
        "resources": {"limits": {GPU: gpus // hosts}} if gpus else {},
    }
    pod: JsonObject = {
        # A new pod replaces an ended one: the fleet counts, backs off, and tells why.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        **NO_LINKS,
        # For a pod that others end, such as by draining a node: as long as its requests may take.
        "terminationGracePeriodSeconds": round(supervise.drain_timeout + supervise.stop_grace),
        "containers": [_with_secrets(container, spec)],
    }
    if gpus:
        pod = with_shared_memory(pod)
    if pool.engine == "sim":
        pod = locked_down(pod)
    return _with_fragment(spec, name, pod)


def process_pod(cluster: str, spec: ClusterSpec, component: str, words: list[str], image: str) -> JsonObject:
    """Return the template of a frontend's or the planner's pod, which makes its run folder from the mounted config."""
    supervise, port = spec.settings.supervise, spec.settings.frontend.port
    frontend = component == "frontend"
    container: JsonObject = {
        "name": CONTAINER,
        "image": image_of(spec, OURS, image),
        "command": [sys.executable],
        "args": ["-m", *words, "--config", f"{CONFIG_DIR}/config.yaml"],
        "env": [*_own_env(cluster, with_secret=True), secret_env(ADMIN_ENV, secret_name(cluster), ADMIN_KEY)],
        "volumeMounts": config_mounts(run=RUNS),
    }
    if frontend:
        container |= {
            **http_port(port),
            "readinessProbe": http_probe(periodSeconds=2),
            "lifecycle": {"preStop": {"exec": {"command": PAUSE}}},
        }
    grace = supervise.stop_grace + (supervise.drain_timeout + PROXY_PAUSE if frontend else 0)
    pod: JsonObject = {
        "serviceAccountName": object_name(cluster, "cluster"),
        **NO_LINKS,
        "terminationGracePeriodSeconds": round(grace),
        "containers": [_with_secrets(container, spec)],
        "volumes": config_volumes(object_name(cluster, "config"), "run"),
    }
    return _with_fragment(spec, component, locked_down(pod))


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


def _own_env(cluster: str, *, with_secret: bool, engine: bool = False) -> list[JsonObject]:
    fields = {"POD_IP": "status.podIP", POD_ENV: "metadata.name"}
    if not engine:  # so that its leases in the store go with it
        fields |= {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    secret = [secret_env(SECRET_ENV, secret_name(cluster), SECRET_KEY)] if with_secret else []
    return [*field_env(fields), *secret]


def secret_name(cluster: str) -> str:
    """Return the name of the Secret with a cluster's secret and the key of its admin routes."""
    return object_name(cluster, "secret")


def _with_secrets(container: JsonObject, spec: ClusterSpec) -> JsonObject:
    name = spec.kubernetes.secrets
    return container if name is None else {**container, "envFrom": [{"secretRef": {"name": name}}]}


def _with_fragment(spec: ClusterSpec, name: str, pod: JsonObject) -> JsonObject:
    return merge({"metadata": {}, "spec": pod}, spec.kubernetes.pod_templates.get(name, {}))
