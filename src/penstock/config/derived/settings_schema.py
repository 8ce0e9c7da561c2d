"""The one walk over settings that writes a schema of them; a dialect says how each part is spelled."""

from typing import Protocol

from penstock.config.derived.knobs import ANY_KEY, ValueShape, fields_by_name, shape_of
from penstock.kernel.settings import Field, Knob, Settings
from penstock.kernel.values import JsonObject

WITH_UNIT = r"^[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?\s*[^\d\s]+$"
"""Text that is a number with a unit."""
JSON_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string"}


class SchemaDialect(Protocol):
    """A kind of schema. A path is the place of a field in the tree of settings."""

    def has(self, field: Field, path: tuple[str, ...]) -> bool:
        """Return whether the schema shows a field."""
        ...

    def group(self, about: JsonObject, properties: JsonObject) -> JsonObject:
        """Return the schema of a settings struct from its description and its fields."""
        ...

    def nested(self, group: type[Settings], path: tuple[str, ...]) -> JsonObject:
        """Return what stands for a group within another: its schema or a reference to it."""
        ...

    def about(self, field: Field, knob: Knob, shape: ValueShape, path: tuple[str, ...]) -> JsonObject:
        """Return what is said of a field beside its type: description, default."""
        ...

    def length(self, count: int) -> JsonObject:
        """Return how a list of a fixed number of items is limited."""
        ...

    def item(self, shape: ValueShape, knob: Knob) -> JsonObject:
        """Return the type of one scalar: a value, an item of a list, an entry of a mapping."""
        ...

    def value(self, item: JsonObject, shape: ValueShape, path: tuple[str, ...]) -> JsonObject:
        """Return the type of a whole field from that of its scalar."""
        ...


def group_schema(dialect: SchemaDialect, group: type[Settings], path: tuple[str, ...] = ()) -> JsonObject:
    """Return the schema of a settings struct."""
    properties: JsonObject = {}
    for field in fields_by_name(group).values():
        here = (*path, field.name)
        if dialect.has(field, here):
            properties[field.name] = _field_schema(dialect, field, here)
    summary = (group.__doc__ or "").strip().splitlines()[0]
    return dialect.group({"type": "object", "description": summary}, properties)


def _field_schema(dialect: SchemaDialect, field: Field, path: tuple[str, ...]) -> JsonObject:
    knob, shape = field.knob, shape_of(field.type)
    if shape.kind == "group":
        return dialect.nested(shape.item, path) | ({"description": knob.help} if knob is not None else {})
    assert knob is not None, field.name
    about = dialect.about(field, knob, shape, path)
    if shape.kind == "entries":
        return {**about, "type": "object", "additionalProperties": dialect.nested(shape.item, (*path, ANY_KEY))}
    item = dialect.item(shape, knob)
    if shape.kind == "list":
        length = {} if shape.count is None else dialect.length(shape.count)
        return {**about, "type": "array", "items": item, **length}
    if shape.kind == "mapping":
        return {**about, "type": "object", "additionalProperties": item}
    return {**about, **dialect.value(item, shape, path)}
