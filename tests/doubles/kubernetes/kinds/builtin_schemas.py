"""Schemas of built-in kinds, read from lightkube's models: fields, types, what is required, and the keys of lists."""

import re
from importlib import import_module
from typing import Any

from penstock.kernel.values import JsonObject

REF = "#/components/schemas/"

LIST_KEYS = {
    "Container": ("name",),
    "EphemeralContainer": ("name",),
    "EnvVar": ("name",),
    "ContainerPort": ("containerPort", "protocol"),
    "Volume": ("name",),
    "VolumeMount": ("mountPath",),
    "VolumeDevice": ("devicePath",),
    "ServicePort": ("port", "protocol"),
    "LocalObjectReference": ("name",),
    "HostAlias": ("ip",),
    "TopologySpreadConstraint": ("topologyKey", "whenUnsatisfiable"),
    "OwnerReference": ("uid",),
    "PodIP": ("ip",),
    "NodeAddress": ("type",),
    "ResourceClaim": ("name",),
    "PodResourceClaim": ("name",),
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
_DESCRIPTION = re.compile(r"^\s+\* \*\*(\w+)\*\* ``[^`]*``(?: - )?(.*?)(?=^\s+\* \*\*|\Z)", re.MULTILINE | re.DOTALL)


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
        text = model.__doc__ or ""
        notes = {field: " ".join(note.split()) for field, note in _DESCRIPTION.findall(text)}
        properties: JsonObject = {}
        names = model.__struct_encode_fields__
        for field, name in zip(model.__struct_fields__, names, strict=True):
            schema = self._field(name, model.__annotations__[field], model.__module__)
            properties[name] = schema | ({"description": notes[field]} if notes.get(field) else {})
        required = list(names[: len(names) - len(model.__struct_defaults__)])
        schema = {
            "type": "object",
            "properties": properties,
            "description": text.partition("**parameters**")[0].strip(),
        }
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
