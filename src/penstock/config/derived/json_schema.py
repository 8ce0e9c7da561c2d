"""JSON Schema of a config file, for editors, derived from the same knobs."""

import json
from typing import Any, Literal, get_args, get_origin

import msgspec

from penstock.config.derived.knobs import entry_type, fields_by_name
from penstock.config.reading.units import EXAMPLES
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.settings import Field, Knob, Settings, is_group, or_word, without_none
from penstock.kernel.values import JsonObject

_NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
WITH_UNIT = r"^[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?\s*[^\d\s]+$"


def json_schema() -> JsonObject:
    """Return the JSON Schema of a config file; each settings struct is one definition."""
    definitions: JsonObject = {}
    top = _group(ClusterSettings, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Penstock cluster",
        **top,
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    """Return the JSON Schema as indented text."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _group(group: type[Settings], definitions: JsonObject) -> JsonObject:
    properties: JsonObject = {}
    for field in fields_by_name(group).values():
        properties[field.name] = _field(field, definitions)
    return {
        "type": "object",
        "description": (group.__doc__ or "").strip().splitlines()[0],
        "additionalProperties": False,
        "properties": properties,
    }


def _field(field: Field, definitions: JsonObject) -> JsonObject:
    knob = field.knob
    if is_group(field.type):
        return {**_reference(field.type, definitions), **({"description": knob.help} if knob is not None else {})}
    assert knob is not None, field.name
    entry = entry_type(field.type)
    plain = without_none(field.type)
    described: JsonObject = {"description": knob.help}
    if knob.unit is not None:
        described["x-unit"] = knob.unit
    described["default"] = msgspec.to_builtins(field.default)
    if entry is not None:
        return {**described, "type": "object", "additionalProperties": _reference(entry, definitions)}
    origin = get_origin(plain)
    if origin in (tuple, list):
        return {**described, "type": "array", "items": _scalar(get_args(plain)[0], knob)}
    if origin is dict:
        return {**described, "type": "object", "additionalProperties": _scalar(get_args(plain)[1], knob)}
    value = _scalar(plain, knob)
    if plain is field.type:
        return {**described, **value}
    choices = value.pop("anyOf", None) or [value]
    return {**described, "anyOf": [*choices, {"type": "null"}]}


def _reference(group: type[Settings], definitions: JsonObject) -> JsonObject:
    name = group.__name__
    if name not in definitions:
        definitions[name] = {}  # reserves the name while the definitions below it are written
        definitions[name] = _group(group, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _scalar(hint: Any, knob: Knob) -> JsonObject:
    hint, word = or_word(hint)
    if word is not None:
        value = _scalar(hint, knob)
        return {"anyOf": [*(value.pop("anyOf", None) or [value]), {"const": word}]}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    found: JsonObject = {"type": _NAMES[hint]}
    if hint not in (int, float):
        return found
    for name, word in (
        ("ge", "minimum"),
        ("gt", "exclusiveMinimum"),
        ("le", "maximum"),
        ("lt", "exclusiveMaximum"),
    ):
        bound = getattr(knob, name)
        if bound is not None:
            found[word] = bound
    if knob.unit is None:
        return found
    return {"anyOf": [found, {"type": "string", "pattern": WITH_UNIT, "examples": [EXAMPLES[knob.unit]]}]}
