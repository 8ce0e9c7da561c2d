"""Graph deployment: the prefill and decode services of a DynamoGraphDeployment as pools.

Dynamo's operator follows the replicas of the resource; where it made a DynamoGraphDeploymentScalingAdapter for a
service, that adapter owns the number, and its scale subresource is what may be written. Versions v1beta1 (a list of
components) and v1alpha1 (a map of services) are both read.
"""

import logging
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lightkube import AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject, Pool, Role
from penstock_kubernetes.connector.api_access import absent, call, gpus_of_pod, gpus_of_resources
from penstock_kubernetes.connector.scale_target import ApiRight, PoolReading, TargetError
from penstock_kubernetes.connector.scaled_object import patch_scale

log = logging.getLogger("penstock.planner")

GROUP = "nvidia.com"
KIND, PLURAL = "DynamoGraphDeployment", "dynamographdeployments"
ADAPTER, ADAPTERS = "DynamoGraphDeploymentScalingAdapter", "dynamographdeploymentscalingadapters"
VERSIONS = ("v1beta1", "v1alpha1")
PARENT_ENV = "DYN_PARENT_DGD_K8S_NAME"
"""Environment name by which Dynamo's operator tells a planner the resource that it belongs to."""
LEGACY_NAMES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("VllmPrefillWorker", "SGLangPrefillWorker", "TRTLLMPrefillWorker", "prefill"),
    "decode": ("VllmDecodeWorker", "SGLangDecodeWorker", "TRTLLMDecodeWorker", "VllmWorker", "decode"),
}
"""Names of services before they had a type of their own; still read, with a warning."""
MODEL_FLAGS = ("--served-model-name", "--model-name", "--model", "--model-path")


class GraphService(NamedTuple):
    """One service of a graph, in the words of either version.

    Args:
        path: JSON pointer to it.
        guard: pointer to a value that a list's entry must still have, and that value; None in a map.
    """

    name: str
    type: str
    fields: JsonObject
    path: str
    guard: tuple[str, str] | None

    @property
    def replicas(self) -> int:
        count = self.fields.get("replicas")
        return 1 if count is None else int(count)

    @property
    def gpus(self) -> int | None:
        main, template = self._containers()
        own = gpus_of_resources(self.fields.get("resources") or {})
        return own if own is not None else gpus_of_pod({"containers": [main, *template]})

    @property
    def model(self) -> str | None:
        main, template = self._containers()
        for container in (main, *template):
            words = [word for text in container.get("args") or () for word in shlex.split(str(text))]
            for flag in MODEL_FLAGS:
                if flag in words[:-1]:
                    return words[words.index(flag) + 1]
        return None

    def _containers(self) -> tuple[JsonObject, Sequence[JsonObject]]:
        main = (self.fields.get("extraPodSpec") or {}).get("mainContainer") or {}
        template = ((self.fields.get("podTemplate") or {}).get("spec") or {}).get("containers") or []
        return main, template


class GraphDeployment:
    """A `penstock_kubernetes.connector.scale_target.ScaleTarget` over one DynamoGraphDeployment.

    Args:
        roles: that are planned; an aggregated worker is a decode service there.
        model: of the config.
    """

    def __init__(self, client: AsyncClient, name: str, *, model: str, roles: Sequence[Role]) -> None:
        self._client = client
        self._name = name
        self._model = model
        self._roles = roles
        self._resource: Any = None
        self._version = VERSIONS[0]
        self._adapters: Mapping[str, JsonObject] = {}
        """Service -> the adapter that owns its number, as last read."""
        self._services: Mapping[str, GraphService] = {}
        """Pool -> its service, as last read."""
        self._warned: set[str] = set()

    @property
    def rights(self) -> tuple[ApiRight, ...]:
        rights = [ApiRight("get", GROUP, PLURAL, self._name), ApiRight("list", GROUP, ADAPTERS)]
        for service in self._services.values():
            owner = self._adapters.get(service.name)
            if owner is not None:
                rights.append(ApiRight("patch", GROUP, f"{ADAPTERS}/scale", owner["metadata"]["name"]))
        if any(service.name not in self._adapters for service in self._services.values()):
            rights.append(ApiRight("patch", GROUP, PLURAL, self._name))
        return tuple(rights)

    async def read(self) -> Mapping[str, PoolReading]:
        graph = await self._graph()
        self._adapters = await self._owners()
        services = _services(graph)
        wanted = {_pool_of_role(role): role for role in self._roles}
        self._services = {pool: self._service(services, pool) for pool in wanted}
        self._check_models()
        meta, status = graph["metadata"], graph.get("status") or {}
        readings = {}
        for pool, service in self._services.items():
            owner = self._adapters.get(service.name)
            count = service.replicas if owner is None else int((owner.get("spec") or {}).get("replicas", 0))
            generation = meta.get("generation")
            labels = {f"{GROUP}/dynamo-graph-deployment-name": self._name, f"{GROUP}/dynamo-component": service.name}
            readings[pool] = PoolReading(
                Pool(
                    model=self._model,
                    role=wanted[pool],
                    desired=count,
                    gpus=max(1, service.gpus or 1),
                    acknowledged=status.get("observedGeneration", generation) == generation,
                ),
                str((meta if owner is None else owner["metadata"])["resourceVersion"]),
                labels,
            )
        return readings

    async def write(self, pool: str, replicas: int, readings: Mapping[str, PoolReading]) -> None:
        service, version = self._services[pool], readings[pool].version
        owner = self._adapters.get(service.name)
        if owner is not None:
            name = owner["metadata"]["name"]
            resource = _adapter_resource(self._version)
            await patch_scale(self._client, resource, name, replicas, version, words=f"{ADAPTER} {name}")
            return
        changes: list[JsonObject] = [{"op": "replace", "path": "/metadata/resourceVersion", "value": version}]
        if service.guard is not None:
            changes.append({"op": "test", "path": service.guard[0], "value": service.guard[1]})
        changes.append({"op": "add", "path": f"{service.path}/replicas", "value": replicas})
        await call(
            f"patch {self.describe()} to {pool}={replicas}",
            lambda: self._client.patch(self._resource, self._name, changes, patch_type=PatchType.JSON),
        )

    def describe(self) -> str:
        return f"{KIND} {self._name}"

    async def _graph(self) -> JsonObject:
        """Return the resource, in the newest version that the API server has."""
        for version in (self._version, *(other for other in VERSIONS if other != self._version)):
            resource = create_namespaced_resource(GROUP, version, KIND, PLURAL)
            get = partial(self._client.get, resource, self._name)
            try:
                graph: Any = await call(f"read {self.describe()}", get)
            except TargetError as error:
                if not absent(error):
                    raise
                continue
            self._resource, self._version = resource, version
            return dict(graph.to_dict())
        raise ConfigError(
            f"there is no {KIND} {self._name} in namespace {self._client.namespace}",
            hint=f"name it in planner.kubernetes.target, or let Dynamo's operator set {PARENT_ENV}",
        )

    async def _owners(self) -> Mapping[str, JsonObject]:
        """Return the scaling adapters of this graph, by service."""
        resource = _adapter_resource(self._version)

        async def listed() -> list[JsonObject]:
            return [adapter.to_dict() async for adapter in self._client.list(resource)]

        try:
            adapters = await call(f"list {ADAPTERS}", listed)
        except TargetError as error:
            if absent(error):  # an operator from before there were any
                return {}
            raise
        owners = {}
        for adapter in adapters:
            of = (adapter.get("spec") or {}).get("dgdRef") or {}
            if of.get("name") == self._name:
                owners[str(of.get("serviceName") or of.get("componentName"))] = adapter
        return owners

    def _service(self, services: Sequence[GraphService], pool: str) -> GraphService:
        typed = [service for service in services if service.type == pool]
        if len(typed) > 1:
            names = ", ".join(sorted(service.name for service in typed))
            raise ConfigError(
                f"{self.describe()} must have only one service with subComponentType '{pool}', and has {names}",
                hint="a planner scales one service of each kind: take the type from the others",
            )
        if typed:
            return typed[0]
        legacy = [each for each in services if each.name in LEGACY_NAMES[pool] and each.type in ("", "worker", pool)]
        if not legacy:
            names = ", ".join(service.name for service in services) or "none at all"
            raise ConfigError(
                f"{self.describe()} must have a service with subComponentType '{pool}'; its services are {names}",
                hint=f"set subComponentType: {pool} (type: {pool} in v1beta1) on that service",
            )
        if legacy[0].name not in self._warned:
            self._warned.add(legacy[0].name)
            log.warning(
                "%s: service %s is taken for %s by its name alone, which is deprecated; set its subComponentType",
                self.describe(),
                legacy[0].name,
                pool,
            )
        return legacy[0]

    def _check_models(self) -> None:
        names = {pool: service.model for pool, service in self._services.items() if service.model is not None}
        if len(set(names.values())) > 1:
            text = " and ".join(f"{pool} serves {name}" for pool, name in names.items())
            raise ConfigError(f"{self.describe()}: {text}", hint="one planner plans one model")
        for name in names.values():
            if name != self._model:
                raise ConfigError(
                    f"{self.describe()} serves {name}, and the config's model is {self._model}",
                    hint="give the config's model the name that the services serve",
                )


def _pool_of_role(role: Role) -> str:
    return "prefill" if role == "prefill" else "decode"


def _adapter_resource(version: str) -> Any:
    return create_namespaced_resource(GROUP, version, ADAPTER, ADAPTERS)


def _services(graph: JsonObject) -> list[GraphService]:
    spec = graph.get("spec") or {}
    found = []
    for index, fields in enumerate(spec.get("components") or ()):
        path, name = f"/spec/components/{index}", str(fields["name"])
        found.append(GraphService(name, str(fields.get("type") or ""), fields, path, (f"{path}/name", name)))
    for name, fields in (spec.get("services") or {}).items():
        kind = str(fields.get("subComponentType") or fields.get("componentType") or "")
        pointer = name.replace("~", "~0").replace("/", "~1")
        found.append(GraphService(name, kind, fields, f"/spec/services/{pointer}", None))
    return found
