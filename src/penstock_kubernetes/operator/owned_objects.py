"""Objects of a cluster besides its engines: config, secret, rights, frontends, planner, Service, monitors.

All are applied by server-side apply, again and again, and owned by the PenstockCluster: the garbage collector deletes
them with it.
"""

import secrets
from typing import TYPE_CHECKING, Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.api_request import ask, code_of
from penstock_kubernetes.api.rights import STORE_RIGHTS, rules
from penstock_kubernetes.operator import object_names as names
from penstock_kubernetes.operator.cluster_spec import ClusterSpec
from penstock_kubernetes.operator.pod_template import ADMIN_KEY, SECRET_KEY, process_pod, template_hash

if TYPE_CHECKING:
    from lightkube import AsyncClient

RESTARTED = "penstock.io/restarted-at"
"""Annotation of a pod template: a new value replaces the frontends one by one."""
FRONTEND = "penstock.frontend.frontend_process"
PLANNER = "penstock.cli.planner_process"


class SecretTexts(tuple[str, str]):
    """The cluster's secret, and the key of its admin routes."""

    __slots__ = ()

    @property
    def cluster(self) -> str:
        return self[0]

    @property
    def admin(self) -> str:
        return self[1]


def cluster_objects(cluster: JsonObject, spec: ClusterSpec, image: str) -> list[JsonObject]:
    """Return the objects in the order in which they are applied."""
    name = cluster["metadata"]["name"]
    objects = [
        _made(cluster, "v1", "ConfigMap", "config", data={"config.yaml": spec.config}),
        _made(cluster, "v1", "ServiceAccount", "cluster"),
        _made(cluster, "rbac.authorization.k8s.io/v1", "Role", "cluster", rules=rules(STORE_RIGHTS)),
        _made(
            cluster,
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            "cluster",
            roleRef={
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": names.object_name(name, "cluster"),
            },
            subjects=[{"kind": "ServiceAccount", "name": names.object_name(name, "cluster")}],
        ),
        _service(cluster, spec),
        _deployment(cluster, spec, "frontend", [FRONTEND], spec.frontends, image),
        _budget(cluster, spec),
    ]
    if spec.settings.planner.enabled:
        objects.append(_deployment(cluster, spec, "planner", [PLANNER], 1, image))
    if spec.kubernetes.monitor:
        endpoint = {"port": "http", "path": "/metrics"}
        monitor = _made(cluster, "monitoring.coreos.com/v1", "PodMonitor", "frontend")
        monitor["spec"] = {
            "selector": {"matchLabels": names.selector(name, "frontend")},
            "podMetricsEndpoints": [endpoint],
        }
        objects.append(monitor)
    return objects


async def apply_objects(client: "AsyncClient", objects: list[JsonObject]) -> None:
    """Apply objects; what others set in fields that are not ours stays.

    Raises:
        StoreUnavailable: the API server can't be reached, or refuses this login.
        ConfigError: it refuses one of the objects.
    """
    from lightkube import ApiError

    for manifest in objects:
        loaded = _loaded(manifest)
        try:
            # Ours are ours: who edits a field that the spec decides edits the spec.
            await ask(lambda loaded=loaded: client.apply(loaded, field_manager=names.MANAGER, force=True))  # type: ignore[misc]
        except ApiError as error:
            what = f"{manifest['kind']} {manifest['metadata']['name']}"
            if code_of(error) == 404 and manifest["kind"] == "PodMonitor":
                hint = "install the Prometheus operator, or leave spec.kubernetes.monitor out"
                raise ConfigError(f"{what} can't be made: there is no such kind of resource", hint=hint) from error
            raise ConfigError(f"{what} is refused: {error.status.message}") from error


async def delete_planner(client: "AsyncClient", cluster: JsonObject) -> None:
    """Delete the planner of a cluster whose spec has none any more."""
    from lightkube import ApiError
    from lightkube.resources.apps_v1 import Deployment

    metadata = cluster["metadata"]
    name = names.object_name(metadata["name"], "planner")
    try:
        await ask(lambda: client.delete(Deployment, name, namespace=metadata["namespace"]))
    except ApiError as error:
        if code_of(error) != 404:
            raise ConfigError(f"Deployment {name} can't be deleted: {error.status.message}") from error


async def secret_texts(client: "AsyncClient", cluster: JsonObject) -> SecretTexts:
    """Return the cluster's secret and admin key, made once.

    Raises:
        StoreUnavailable: the API server can't be reached.
        ConfigError: it refuses.
    """
    import base64

    from lightkube import ApiError
    from lightkube.resources.core_v1 import Secret

    texts = {SECRET_KEY: secrets.token_urlsafe(32), ADMIN_KEY: secrets.token_urlsafe(24)}
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    manifest = _made(cluster, "v1", "Secret", "secret", type="Opaque", data=data)
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    for _ in range(2):
        try:
            there = await ask(lambda: client.get(Secret, name, namespace=namespace))
            kept = there.data or {}
            return SecretTexts(base64.b64decode(kept[key]).decode() for key in (SECRET_KEY, ADMIN_KEY))
        except ApiError as error:
            if code_of(error) != 404:
                raise ConfigError(f"Secret {name} can't be read: {error.status.message}") from error
        except KeyError as error:
            raise ConfigError(f"Secret {name} has no {error}", hint="delete it: it is made again") from error
        try:
            await ask(lambda: client.create(Secret.from_dict(manifest)))
        except ApiError as error:
            if code_of(error) != 409:
                raise ConfigError(f"Secret {name} is refused: {error.status.message}") from error
    raise ConfigError(f"Secret {name} is neither there nor can it be made", hint="does somebody delete it?")


async def secret_env(client: "AsyncClient", namespace: str, name: str | None) -> dict[str, str]:
    """Return the environment that a Secret gives to a cluster's pods; none where the spec names no Secret.

    Raises:
        StoreUnavailable: the API server can't be reached.
        ConfigError: it refuses.
    """
    import base64

    from lightkube import ApiError
    from lightkube.resources.core_v1 import Secret

    if name is None:
        return {}
    try:
        there = await ask(lambda: client.get(Secret, name, namespace=namespace))
    except ApiError as error:
        raise ConfigError(f"Secret {name} of spec.kubernetes.secrets can't be read: {error.status.message}") from error
    return {key: base64.b64decode(text).decode("utf-8", "replace") for key, text in (there.data or {}).items()}


def _loaded(manifest: JsonObject) -> Any:
    from lightkube import codecs
    from lightkube.generic_resource import create_namespaced_resource

    if manifest["kind"] == "PodMonitor":
        return create_namespaced_resource("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors").from_dict(
            manifest
        )
    return codecs.from_dict(manifest)


def _made(cluster: JsonObject, version: str, kind: str, part: str, **fields: object) -> JsonObject:
    metadata = cluster["metadata"]
    component = part if part in ("frontend", "planner") else "cluster"
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": names.object_name(metadata["name"], part),
            "namespace": metadata["namespace"],
            "labels": names.selector(metadata["name"], component),
            "ownerReferences": [names.owner_reference(cluster)],
        },
        **fields,
    }


def _service(cluster: JsonObject, spec: ClusterSpec) -> JsonObject:
    name, port = cluster["metadata"]["name"], spec.settings.frontend.port
    service = _made(cluster, "v1", "Service", "frontend")
    service["metadata"]["name"] = names.object_name(name)
    ports = [{"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}]
    service["spec"] = {"selector": names.selector(name, "frontend"), "ports": ports}
    return service


def _budget(cluster: JsonObject, spec: ClusterSpec) -> JsonObject:
    name = cluster["metadata"]["name"]
    budget = _made(cluster, "policy/v1", "PodDisruptionBudget", "frontend")
    # One frontend alone would block the drain of its node for ever.
    budget["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": names.selector(name, "frontend")}}
    return budget


def _deployment(
    cluster: JsonObject, spec: ClusterSpec, component: str, words: list[str], replicas: int, image: str
) -> JsonObject:
    name = cluster["metadata"]["name"]
    pod = process_pod(name, spec, component, words, image)
    labels = names.selector(name, component)
    pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), **labels}
    annotations = {
        **(pod["metadata"].get("annotations") or {}),
        names.TEMPLATE: template_hash({"config": spec.lasting}),
    }
    pod["metadata"]["annotations"] = annotations
    made = _made(cluster, "apps/v1", "Deployment", component)
    # A new frontend serves before an old one stops to accept; of planners there is never more than one.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    made["spec"] = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "strategy": rolling if component == "frontend" else {"type": "Recreate"},
        "template": pod,
    }
    return made
