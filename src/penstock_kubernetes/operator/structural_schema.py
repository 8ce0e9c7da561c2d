"""Structural schema of a PenstockCluster's spec: the knobs in the part of OpenAPI v3 that the API server checks."""

from collections.abc import Mapping

import msgspec

from penstock.config.derived.knobs import ValueShape, dotted
from penstock.config.derived.settings_schema import JSON_NAMES, WITH_UNIT, group_schema
from penstock.kernel.settings import Field, Knob, Settings
from penstock.kernel.values import JsonObject

IN_PODS: Mapping[str, object] = {
    "frontend.host": "0.0.0.0",
    "frontend.security.insecure": True,
    "discovery.store": "kubernetes",
}
"""Other defaults than on one machine: a Service reaches a frontend at its pod's address; who reaches the Service may
ask, where no keys are set; what a cluster knows of itself lies in the API server."""
LEFT_OUT = (
    "cluster_secret_file",
    "discovery.host",
    "discovery.kubernetes",
    "frontend.admin_port",
    "runs.dir",
    "supervise.gpus",
    "supervise.namespace",
    "supervise.orphan_grace",
)
"""Knobs of one machine, which the operator sets itself."""
READABLE_SECRETS = ("env",)
"""Secret knobs that a spec may have: an engine's environment, in which a Secret can be named, too."""

_NO_OTHER_TYPES: JsonObject = {"not": {"enum": [True, False, {}, []]}, "maxProperties": 0, "maxItems": 0}
"""A number or a text has no type in a structural schema, so the other types are refused one by one."""


class StructuralSchema:
    """Schema in which defaults stand at the knobs, so that a group left out stays out."""

    def has(self, field: Field, path: tuple[str, ...]) -> bool:
        secret = field.knob is not None and field.knob.secret and field.name not in READABLE_SECRETS
        return not secret and dotted(path) not in LEFT_OUT

    def group(self, about: JsonObject, properties: JsonObject) -> JsonObject:
        return {**about, "properties": properties}

    def nested(self, group: type[Settings], path: tuple[str, ...]) -> JsonObject:
        return group_schema(self, group, path)

    def about(self, field: Field, knob: Knob, shape: ValueShape, path: tuple[str, ...]) -> JsonObject:
        about: JsonObject = {"description": knob.help + ("" if knob.unit is None else f" In {knob.unit}.")}
        if shape.kind == "entries":
            return about
        if shape.nullable:
            about["nullable"] = True
        default = msgspec.json.decode(msgspec.json.encode(IN_PODS.get(dotted(path), field.default)))
        return about if default is None else {**about, "default": default}

    def length(self, count: int) -> JsonObject:
        return {"minItems": count, "maxItems": count}

    def item(self, shape: ValueShape, knob: Knob) -> JsonObject:
        named = {"type": JSON_NAMES[shape.item]}
        if shape.kind == "choice":
            return {**named, "enum": list(shape.choices)}
        if shape.item not in (int, float):
            return named
        bounds = _bounds("minimum", knob.ge, knob.gt) | _bounds("maximum", knob.le, knob.lt)
        texts = [] if knob.unit in (None, "count") else [WITH_UNIT]
        if shape.word is not None:
            texts.append(f"^{shape.word}$")
        if not texts:
            return {**named, **bounds}
        pattern = "|".join(f"(?:{text})" for text in texts) if len(texts) > 1 else texts[0]
        if shape.item is int:
            return {"x-kubernetes-int-or-string": True, "pattern": pattern, **bounds}
        return {"x-kubernetes-preserve-unknown-fields": True, "pattern": pattern, **bounds, **_NO_OTHER_TYPES}

    def value(self, item: JsonObject, shape: ValueShape, path: tuple[str, ...]) -> JsonObject:
        choices = item.get("enum")
        if choices is None:
            return item
        if dotted(path) == "discovery.store":  # a database in a run folder is for one machine
            choices = [kind for kind in choices if kind != "sqlite"]
        return {**item, "enum": [*choices, None] if shape.nullable else choices}


def _bounds(name: str, closed: float | None, open_: float | None) -> JsonObject:
    if open_ is not None:
        return {name: open_, f"exclusive{name.capitalize()}": True}
    return {} if closed is None else {name: closed}
