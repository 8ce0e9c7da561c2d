"""Objects of a cluster besides its engines: config, secret, rights, frontends, planner, Service, monitors.

All are applied by server-side apply, again and again, and owned by the PenstockCluster: the garbage collector deletes
them with it.
"""

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.api_client import ask, code_of
from penstock_kubernetes.api.rights import STORE_RIGHTS, rules
from penstock_kubernetes.operator import object_names as names
from penstock_kubernetes.operator.cluster_spec import ClusterSpec
from penstock_kubernetes.operator.manifest_parts import Manifests, template_hash
from penstock_kubernetes.operator.pod_template import ADMIN_KEY, SECRET_KEY, process_pod, secret_name

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
    manifests = Manifests(name, cluster)
    frontends = names.selector(name, "frontend")
    part = partial(names.object_name, name)
    # One frontend alone would block the drain of its node for ever.
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": frontends}}
    # A new frontend serves before an old one stops accepting; of planners there is never more than one.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}

    def deployment(component: str, module: str, replicas: int, strategy: JsonObject) -> JsonObject:
        pod = process_pod(name, spec, component, [module], image)
        annotations = pod["metadata"].get("annotations") or {}
        pod["metadata"]["annotations"] = {**annotations, names.TEMPLATE: template_hash({"config": spec.lasting})}
        return manifests.deployment(part(component), component, pod, replicas=replicas, strategy=strategy)

    objects = [
        manifests.made("v1", "ConfigMap", part("config"), data={"config.yaml": spec.config}),
        *manifests.rights(part("cluster"), rules(STORE_RIGHTS)),
        manifests.service(part(), spec.settings.frontend.port, protocol="TCP"),
        deployment("frontend", FRONTEND, spec.frontends, rolling),
        manifests.made("policy/v1", "PodDisruptionBudget", part("frontend"), component="frontend", spec=budget),
    ]
    if spec.settings.planner.enabled:
        objects.append(deployment("planner", PLANNER, 1, {"type": "Recreate"}))
    if spec.kubernetes.monitor:
        endpoints = [{"port": "http", "path": "/metrics"}]
        watched = {"selector": {"matchLabels": frontends}, "podMetricsEndpoints": endpoints}
        kind = ("monitoring.coreos.com/v1", "PodMonitor")
        objects.append(manifests.made(*kind, part("frontend"), component="frontend", spec=watched))
    return objects


async def apply_objects(client: "AsyncClient", objects: list[JsonObject]) -> None:
    """Apply objects; what others set in fields that are not ours stays.

    Raises:
        StoreUnavailable: the API server can't be reached, or refuses this login.
        ConfigError: it refuses one of the objects.
    """
    from lightkube import ApiError

    for manifest in objects:
        loaded = _object_from_manifest(manifest)
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
    manifest = Manifests(cluster["metadata"]["name"], cluster).made(
        "v1", "Secret", secret_name(cluster["metadata"]["name"]), type="Opaque", data=data
    )
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


def _object_from_manifest(manifest: JsonObject) -> Any:
    from lightkube import codecs
    from lightkube.generic_resource import create_namespaced_resource

    if manifest["kind"] == "PodMonitor":
        return create_namespaced_resource("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors").from_dict(
            manifest
        )
    return codecs.from_dict(manifest)
