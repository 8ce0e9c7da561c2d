"""Structural schema of a PenstockCluster's spec: the knobs in the part of OpenAPI v3 that the API server checks."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from penstock.config.derived.json_schema import WITH_UNIT
from penstock.config.derived.knobs import dotted, entry_type, fields_by_name
from penstock.kernel.settings import Field, Knob, Settings, is_group, or_word, without_none
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

_NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_NO_OTHER_TYPES: JsonObject = {"not": {"enum": [True, False, {}, []]}, "maxProperties": 0, "maxItems": 0}
"""A number or a text has no type in a structural schema, so the other types are refused one by one."""


def group_schema(group: type[Settings], path: tuple[str, ...] = ()) -> JsonObject:
    """Return the schema of a settings struct. Defaults stand at the knobs, so that a group left out stays out."""
    properties: JsonObject = {}
    for field in fields_by_name(group).values():
        here = (*path, field.name)
        secret = field.knob is not None and field.knob.secret and field.name not in READABLE_SECRETS
        if not secret and dotted(here) not in LEFT_OUT:
            properties[field.name] = _field(field, here)
    return {"type": "object", "description": (group.__doc__ or "").strip().splitlines()[0], "properties": properties}


def _field(field: Field, path: tuple[str, ...]) -> JsonObject:
    knob = field.knob
    if is_group(field.type):
        return group_schema(field.type, path) | ({"description": knob.help} if knob is not None else {})
    assert knob is not None, field.name
    unit = "" if knob.unit is None else f" In {knob.unit}."
    described: JsonObject = {"description": knob.help + unit}
    entry = entry_type(field.type)
    if entry is not None:
        return {**described, "type": "object", "additionalProperties": group_schema(entry, (*path, "*"))}
    plain = without_none(field.type)
    if plain is not field.type:
        described["nullable"] = True
    default = msgspec.json.decode(msgspec.json.encode(IN_PODS.get(dotted(path), field.default)))
    if default is not None:
        described["default"] = default
    origin = get_origin(plain)
    if origin in (tuple, list):
        first, *others = get_args(plain)
        count = (
            {} if Ellipsis in others or origin is list else {"minItems": 1 + len(others), "maxItems": 1 + len(others)}
        )
        return {**described, "type": "array", "items": _scalar(first, knob), **count}
    if origin is dict:
        return {**described, "type": "object", "additionalProperties": _scalar(get_args(plain)[1], knob)}
    value = _scalar(plain, knob)
    if dotted(path) == "discovery.store":  # a database in a run folder is for one machine
        value["enum"] = [kind for kind in value["enum"] if kind != "sqlite"]
    if plain is not field.type and "enum" in value:
        value["enum"] = [*value["enum"], None]
    return {**described, **value}


def _scalar(hint: Any, knob: Knob) -> JsonObject:
    hint, word = or_word(hint)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return {"type": _NAMES[type(choices[0])], "enum": list(choices)}
    if hint not in (int, float):
        return {"type": _NAMES[hint]}
    bounds: JsonObject = {}
    for low, name in ((True, "minimum"), (False, "maximum")):
        bound, open_bound = (knob.ge, knob.gt) if low else (knob.le, knob.lt)
        if open_bound is not None:
            bounds |= {name: open_bound, f"exclusive{name.capitalize()}": True}
        elif bound is not None:
            bounds[name] = bound
    texts = ([] if knob.unit in (None, "count") else [WITH_UNIT]) + ([] if word is None else [f"^{word}$"])
    if not texts:
        return {"type": _NAMES[hint], **bounds}
    pattern = "|".join(f"(?:{text})" for text in texts) if len(texts) > 1 else texts[0]
    if hint is int:
        return {"x-kubernetes-int-or-string": True, "pattern": pattern, **bounds}
    return {"x-kubernetes-preserve-unknown-fields": True, "pattern": pattern, **bounds, **_NO_OTHER_TYPES}
