"""Kinds that the API server's double serves: built-in ones by lightkube's models, and those of CRDs."""

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import msgspec
from lightkube.core.resource import NamespacedResource, NamespacedResourceG

from penstock.kernel.values import JsonObject

REF = "#/components/schemas/"

LIST_KEYS = {
    "Container": ("name",),
    "EnvVar": ("name",),
    "ContainerPort": ("containerPort", "protocol"),
    "Volume": ("name",),
    "VolumeMount": ("mountPath",),
    "ServicePort": ("port", "protocol"),
    "OwnerReference": ("uid",),
    "PodIP": ("ip",),
}
"""What tells the items of a list apart, by their type; conditions are told apart by their `type`."""
SETS = {"finalizers", "publishNames"}
"""Lists of text that are sets."""
ATOMIC = {"selector", "matchLabels", "nodeSelector"}
"""Fields that one manager owns as a whole."""
TEXT_MAPS = {"labels", "annotations", "matchLabels", "data", "stringData", "binaryData", "nodeSelector"}
"""Maps whose values are text."""
SCALARS: dict[str, JsonObject] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "dict": {"type": "object", "additionalProperties": {}},
    "Time": {"type": "string", "format": "date-time"},
    "MicroTime": {"type": "string", "format": "date-time"},
    "FieldsV1": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "Quantity": {"x-kubernetes-int-or-string": True},
    "IntOrString": {"x-kubernetes-int-or-string": True},
    "RawExtension": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "JSON": {"x-kubernetes-preserve-unknown-fields": True},
    "JSONSchemaPropsOrBool": {"x-kubernetes-preserve-unknown-fields": True},
    "JSONSchemaPropsOrArray": {"x-kubernetes-preserve-unknown-fields": True},
    "JSONSchemaPropsOrStringArray": {"x-kubernetes-preserve-unknown-fields": True},
    "JSONSchemaProps": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}


class BuiltinSchemas:
    """Schemas by name; those of parts of a kind are made with the first kind that has them."""

    def __init__(self) -> None:
        self.definitions: dict[str, JsonObject] = {}

    def of(self, model: type) -> JsonObject:
        """Return a reference to the schema of a model."""
        base = next(kind for kind in model.__mro__ if kind.__module__.startswith("lightkube.models."))
        return self._reference(base)

    def resolve(self, schema: JsonObject) -> JsonObject:
        """Return a schema, or the one that it refers to."""
        reference = schema.get("$ref")
        return schema if reference is None else self.definitions[reference.removeprefix(REF)]

    def _reference(self, model: type) -> JsonObject:
        name = schema_name(model)
        if name not in self.definitions:
            self.definitions[name] = {}  # a type that has itself as a part ends here
            self.definitions[name] = self._object(model)
        return {"$ref": f"{REF}{name}"}

    def _object(self, model: Any) -> JsonObject:
        names = model.__struct_encode_fields__
        properties = {
            name: self._field(name, model.__annotations__[field], model.__module__)
            for field, name in zip(model.__struct_fields__, names, strict=True)
        }
        required = list(names[: len(names) - len(model.__struct_defaults__)])
        schema: JsonObject = {"type": "object", "properties": properties}
        return schema | ({"required": required} if required else {})

    def _field(self, name: str, annotation: str, module: str) -> JsonObject:
        if match := re.fullmatch(r"Optional\[(.*)\]", annotation):
            annotation = match[1]
        if match := re.fullmatch(r"List\[(.*)\]", annotation):
            item, kind = self._field("", match[1], module), match[1].rpartition(".")[2]
            schema: JsonObject = {"type": "array", "items": item}
            if keys := ("type",) if kind.endswith("Condition") else LIST_KEYS.get(kind):
                schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
                schema |= {"x-kubernetes-patch-merge-key": keys[0], "x-kubernetes-patch-strategy": "merge"}
            elif name in SETS:
                schema |= {"x-kubernetes-list-type": "set", "x-kubernetes-patch-strategy": "merge"}
            return schema
        if scalar := SCALARS.get(annotation.rpartition(".")[2]):
            atomic = name in ATOMIC and scalar.get("type") == "object"
            if annotation == "dict" and name in TEXT_MAPS:
                scalar = {"type": "object", "additionalProperties": {"type": "string"}}
            return scalar | ({"x-kubernetes-map-type": "atomic"} if atomic else {})
        owner, _, kind = annotation.rpartition(".")
        model = getattr(import_module(f"lightkube.models.{owner}" if owner else module), kind)
        if not isinstance(model, type) or model is dict:
            return {"x-kubernetes-preserve-unknown-fields": True}
        reference = self._reference(model)
        if kind == "LabelSelector":
            return reference | {"x-kubernetes-map-type": "atomic"}
        return reference


def schema_name(model: type) -> str:
    """Return the name that Kubernetes gives to a type in its OpenAPI, such as ``io.k8s.api.core.v1.Pod``."""
    group, _, version = model.__module__.rpartition(".")[2].rpartition("_")
    if group == "meta":
        return f"io.k8s.apimachinery.pkg.apis.meta.{version}.{model.__name__}"
    if group == "apiextensions":
        return f"io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.{version}.{model.__name__}"
    return f"io.k8s.api.{group}.{version}.{model.__name__}"


BUILT_IN = {
    "core_v1": "Namespace:ns Node:no Pod:po Service:svc ConfigMap:cm Secret ServiceAccount:sa Event:ev",
    "apps_v1": "Deployment:deploy ReplicaSet:rs StatefulSet:sts",
    "policy_v1": "PodDisruptionBudget:pdb",
    "coordination_v1": "Lease",
    "discovery_v1": "EndpointSlice",
    "networking_v1": "NetworkPolicy:netpol",
    "rbac_authorization_v1": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "apiextensions_v1": "CustomResourceDefinition:crd,crds",
    "authorization_v1": "SelfSubjectAccessReview",
}
"""Modules of lightkube's resources, with the kinds and their short names; the rest of a kind is read from there."""
REVIEW = "SelfSubjectAccessReview"
"""Kind that is created to be answered, and stored nowhere."""
SELECTABLE_FIELDS = {
    "pods": "spec.nodeName status.phase status.podIP",
    "events": (
        "involvedObject.kind involvedObject.apiVersion involvedObject.namespace involvedObject.name involvedObject.uid "
        "reason type"
    ),
    "secrets": "type",
    "namespaces": "status.phase",
}
NO_GENERATION = {"ConfigMap", "Secret", "ServiceAccount", "Service", "Event", "Node", "Namespace", "Lease"}
NO_GENERATION |= {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
"""Built-in kinds without `metadata.generation` (EndpointSlices count, and pods since Kubernetes 1.33)."""


class PrinterColumn(msgspec.Struct, frozen=True):
    """A column of `kubectl get`, with the JSONPath of a CRD; built-in kinds compute theirs."""

    name: str
    type: str = "string"
    path: str = ""
    priority: int = 0


AGE = PrinterColumn("Age", "date", ".metadata.creationTimestamp")


class ScalePaths(msgspec.Struct, frozen=True):
    """Where a kind has the fields of its scale subresource."""

    replicas: str = ".spec.replicas"
    status_replicas: str = ".status.replicas"
    selector: str = ""


class ResourceKind(msgspec.Struct, frozen=True):
    """A kind in one version, as discovery describes it."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool
    schema: JsonObject = {}
    singular: str = ""
    list_kind: str = ""
    short_names: tuple[str, ...] = ()
    subresources: dict[str, tuple[str, str, str]] = {}
    """Name of a subresource and its own group, version and kind."""
    columns: tuple[PrinterColumn, ...] = (AGE,)
    selectable: tuple[str, ...] = ()
    scale: ScalePaths = ScalePaths()
    custom: bool = False
    generation: bool = True
    review: bool = False

    @property
    def resource(self) -> str:
        """The plural with its group, as in messages and in the store."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """Group and version as objects name them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def has_status(self) -> bool:
        """Whether the status is written apart from the rest."""
        return "status" in self.subresources


class ResourceKinds:
    """All kinds that are served now."""

    def __init__(self) -> None:
        self.schemas = BuiltinSchemas()
        self._built_in = list(_built_in_kinds(self.schemas))
        self._custom: dict[str, list[ResourceKind]] = {}

    def __iter__(self) -> Iterator[ResourceKind]:
        yield from self._built_in
        for kinds in self._custom.values():
            yield from kinds

    def find(self, group: str, version: str, plural: str) -> ResourceKind | None:
        """Return a kind by the names in a path."""
        return next((k for k in self if (k.group, k.version, k.plural) == (group, version, plural)), None)

    def by_table(self, table: str) -> ResourceKind | None:
        """Return the first kind whose objects lie in a table of the store."""
        return next((kind for kind in self if kind.resource == table), None)

    def versions(self) -> dict[str, list[str]]:
        """Return the groups with their versions, the preferred first."""
        groups: dict[str, list[str]] = {}
        for kind in self:
            versions = groups.setdefault(kind.group, [])
            if kind.version not in versions:
                versions.append(kind.version)
        return groups

    def define(self, definition: JsonObject) -> None:
        """Serve the kinds of a CRD, in place of those that it had before."""
        self._custom[definition["metadata"]["name"]] = list(custom_kinds(definition))

    def forget(self, name: str) -> None:
        """Serve the kinds of a CRD no more."""
        self._custom.pop(name, None)


def custom_kinds(definition: JsonObject) -> Iterable[ResourceKind]:
    """Return the kinds of a CRD: one for each version that it serves."""
    spec = definition["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served", True):
            continue
        group, name = spec["group"], version["name"]
        subresources = version.get("subresources") or {}
        scale = subresources.get("scale") or {}
        kinds = {"status": (group, name, names["kind"]), "scale": ("autoscaling", "v1", "Scale")}
        columns = [
            PrinterColumn(column["name"], column.get("type", "string"), column["jsonPath"], column.get("priority", 0))
            for column in version.get("additionalPrinterColumns") or []
        ]
        yield ResourceKind(
            group=group,
            version=name,
            kind=names["kind"],
            plural=names["plural"],
            namespaced=spec["scope"] == "Namespaced",
            schema=(version.get("schema") or {}).get("openAPIV3Schema") or {},
            singular=names.get("singular") or names["kind"].lower(),
            list_kind=names.get("listKind") or f"{names['kind']}List",
            short_names=tuple(names.get("shortNames") or ()),
            subresources={each: kinds[each] for each in ("status", "scale") if each in subresources},
            columns=tuple(columns) or (AGE,),
            selectable=tuple(each["jsonPath"].lstrip(".") for each in version.get("selectableFields") or []),
            scale=ScalePaths(
                scale.get("specReplicasPath", ""),
                scale.get("statusReplicasPath", ""),
                scale.get("labelSelectorPath", ""),
            ),
            custom=True,
        )


def _built_in_kinds(schemas: BuiltinSchemas) -> Iterator[ResourceKind]:
    for module, names in BUILT_IN.items():
        resources = import_module(f"lightkube.resources.{module}")
        infos = [
            each._api_info for _, each in inspect.getmembers(resources, inspect.isclass) if hasattr(each, "_api_info")
        ]
        for kind, _, short in (name.partition(":") for name in names.split()):
            model = getattr(resources, kind)
            info = model._api_info
            plural = info.plural
            subresources = {
                each.action: (each.resource.group, each.resource.version, each.resource.kind)
                for each in infos
                if each.action and each.plural == plural
            }
            if kind == "Pod":
                subresources["portforward"] = ("", "v1", "PodPortForwardOptions")
            resource = f"{plural}.{info.resource.group}" if info.resource.group else plural
            yield ResourceKind(
                group=info.resource.group,
                version=info.resource.version,
                kind=kind,
                plural=plural,
                namespaced=issubclass(model, (NamespacedResource, NamespacedResourceG)),
                schema=schemas.of(model),
                singular=kind.lower(),
                list_kind=f"{kind}List",
                short_names=tuple(filter(None, short.split(","))),
                subresources=subresources,
                selectable=tuple(SELECTABLE_FIELDS.get(resource, "").split()),
                generation=kind not in NO_GENERATION,
                review=kind == REVIEW,
            )
