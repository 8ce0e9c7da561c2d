"""JSON Schema of a config file, for editors, derived from the same knobs."""

import json

import msgspec

from penstock.config.derived.knobs import ValueShape
from penstock.config.derived.settings_schema import JSON_NAMES, WITH_UNIT, group_schema
from penstock.config.reading.units import EXAMPLES
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.settings import Field, Knob, Settings
from penstock.kernel.values import JsonObject

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema() -> JsonObject:
    """Return the JSON Schema of a config file; each settings struct is one definition."""
    dialect = _DraftSchema()
    top = group_schema(dialect, ClusterSettings)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Penstock cluster",
        **top,
        "$defs": dict(sorted(dialect.definitions.items())),
    }


def schema_text() -> str:
    """Return the JSON Schema as indented text."""
    return json.dumps(json_schema(), indent=2) + "\n"


class _DraftSchema:
    """Draft 2020-12: a definition for each group, units as text beside numbers."""

    def __init__(self) -> None:
        self.definitions: JsonObject = {}

    def has(self, field: Field, path: tuple[str, ...]) -> bool:
        return True

    def group(self, about: JsonObject, properties: JsonObject) -> JsonObject:
        return {**about, "additionalProperties": False, "properties": properties}

    def nested(self, group: type[Settings], path: tuple[str, ...]) -> JsonObject:
        name = group.__name__
        if name not in self.definitions:
            self.definitions[name] = {}  # reserves the name while the definitions below it are written
            self.definitions[name] = group_schema(self, group)
        return {"$ref": f"#/$defs/{name}"}

    def about(self, field: Field, knob: Knob, shape: ValueShape, path: tuple[str, ...]) -> JsonObject:
        unit = {} if knob.unit is None else {"x-unit": knob.unit}
        return {"description": knob.help, **unit, "default": msgspec.to_builtins(field.default)}

    def length(self, count: int) -> JsonObject:
        return {}

    def item(self, shape: ValueShape, knob: Knob) -> JsonObject:
        if shape.kind == "choice":
            return {"enum": list(shape.choices)}
        item: JsonObject = {"type": JSON_NAMES[shape.item]}
        forms = [item]
        if shape.item in (int, float):
            bounds = {word: getattr(knob, name) for name, word in _BOUNDS.items()}
            item.update({word: bound for word, bound in bounds.items() if bound is not None})
            if knob.unit is not None:
                forms.append({"type": "string", "pattern": WITH_UNIT, "examples": [EXAMPLES[knob.unit]]})
        if shape.word is not None:
            forms.append({"const": shape.word})
        return item if len(forms) == 1 else {"anyOf": forms}

    def value(self, item: JsonObject, shape: ValueShape, path: tuple[str, ...]) -> JsonObject:
        if not shape.nullable:
            return item
        return {"anyOf": [*item.get("anyOf", [item]), {"type": "null"}]}
