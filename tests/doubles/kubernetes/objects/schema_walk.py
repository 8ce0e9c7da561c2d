"""Objects measured by their schema: unknown fields pruned, defaults set, types and a CRD's rules checked."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import jsonschema
import msgspec

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import Cause
from tests.doubles.kubernetes.objects.patches import Resolve

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_REASONS = {"required": "FieldValueRequired", "enum": "FieldValueNotSupported", "type": "FieldValueTypeInvalid"}


_TEXTS = {
    "minimum": "{path} in body should be greater than or equal to {limit}",
    "maximum": "{path} in body should be less than or equal to {limit}",
    "pattern": "{path} in body should match '{limit}'",
}
"""What Kubernetes says of a value that breaks a rule, where a test or a user reads it."""


class Mistyped(NamedTuple):
    """A value of another type than the schema's."""

    path: str
    value: object
    type: str


class SchemaWalk:
    """One pass over an object: returns it pruned and with defaults, and notes what does not fit."""

    def __init__(self, resolve: Resolve, *, defaults: bool = True) -> None:
        self.resolve = resolve
        self.defaults = defaults
        self.unknown: list[str] = []
        self.mistyped: list[Mistyped] = []
        self.missing: list[str] = []

    def conform(self, value: Any, schema: JsonObject, path: str = "", *, root: bool = False) -> Any:
        """Return a value without unknown fields and with defaults; what is null is left out, unless it may be."""
        schema = self.resolve(schema)
        if schema.get("x-kubernetes-int-or-string"):
            return value if isinstance(value, (int, float, str)) else self._mistyped(path, value, "string")
        expected = schema.get("type")
        if expected and (
            not isinstance(value, _PYTHON_TYPES[expected]) or (isinstance(value, bool) and expected != "boolean")
        ):
            return self._mistyped(path, value, expected)
        if isinstance(value, dict):
            return self._object(value, schema, path, root=root)
        if isinstance(value, list):
            items = schema.get("items") or {}
            return [self.conform(each, items, f"{path}[{index}]") for index, each in enumerate(value)]
        return value

    def _mistyped(self, path: str, value: object, expected: str) -> object:
        self.mistyped.append(Mistyped(path, value, expected))
        return value

    def _object(self, value: JsonObject, schema: JsonObject, path: str, *, root: bool) -> JsonObject:
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties")
        free = schema.get("x-kubernetes-preserve-unknown-fields") or (not properties and "type" not in schema)
        plain = {"apiVersion", "kind", "metadata"} if root or schema.get("x-kubernetes-embedded-resource") else set()
        result: JsonObject = {}
        for name, child in value.items():
            where = f"{path}.{name}" if path else name
            known = properties.get(name)
            if known is None and (name in plain or free):
                result[name] = child
            elif known is None and others in (None, False):
                self.unknown.append(where)
            elif child is None and not (known or {}).get("nullable"):
                continue  # as if it had not been written
            else:
                inner = known if known is not None else others if isinstance(others, dict) else {}
                result[name] = child if child is None else self.conform(child, inner, where)
        for name, known in properties.items():
            if self.defaults and name not in result and "default" in known:
                result[name] = self.conform(deepcopy(known["default"]), known, f"{path}.{name}")
        where = f"{path}." if path else ""
        self.missing += [where + name for name in schema.get("required") or () if result.get(name) is None]
        return result


def rule_breaches(item: JsonObject, schema: JsonObject) -> Iterator[Cause]:
    """Yield what breaks a CRD's schema, in the words of Kubernetes."""
    validator = jsonschema.Draft202012Validator(plain_schema(schema))
    for error in sorted(validator.iter_errors(item), key=lambda each: (list(map(str, each.path)), str(each.validator))):
        if error.validator in ("anyOf", "oneOf", "allOf", "not"):
            yield Cause(field_path(error.path), f"Invalid value: {quoted(error.instance)}: must match: {error.message}")
        else:
            yield _breach(error)


def schema_fault(schema: JsonObject) -> str:
    """Return what is wrong with a CRD's schema as such, or nothing."""
    try:
        jsonschema.Draft202012Validator.check_schema(plain_schema(schema))
    except jsonschema.SchemaError as error:
        return f"{field_path(error.path)}: {error.message}"
    return ""


def _breach(error: Any) -> Cause:
    path, value, limit = field_path(error.path), quoted(error.instance), error.validator_value
    reason = _REASONS.get(error.validator, "FieldValueInvalid")
    match error.validator:
        case "required":
            name = error.message.split("'")[1]
            return Cause(f"{path}.{name}" if path else name, "Required value", reason)
        case "enum":
            return Cause(path, f"Unsupported value: {value}: supported values: {', '.join(map(quoted, limit))}", reason)
        case "type":
            kind = limit if isinstance(limit, str) else limit[0]
            shown = quoted(json_type(error.instance))
            return Cause(path, f"Invalid value: {shown}: {path} in body must be of type {kind}: {shown}", reason)
    text = _TEXTS[error.validator].format(path=path, limit=limit) if error.validator in _TEXTS else error.message
    return Cause(path, f"Invalid value: {value}: {text}", reason)


def plain_schema(schema: Any) -> Any:
    """Return a structural schema as JSON Schema: what Kubernetes adds is spelled out."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        name: {key: plain_schema(each) for key, each in value.items()}
        if name == "properties" and isinstance(value, dict)
        else plain_schema(value)
        for name, value in schema.items()
        if name not in ("default", "description", "example", "nullable") and not name.startswith("x-kubernetes-")
    }
    for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if plain.pop(strict, False) is True:
            plain[strict] = plain.pop(bound)
    if schema.get("x-kubernetes-int-or-string"):
        plain["type"] = ["integer", "string"]
    if schema.get("nullable") and "type" in plain:
        types = plain["type"]
        plain["type"] = [*(types if isinstance(types, list) else [types]), "null"]
    return plain


def field_path(path: Sequence[object]) -> str:
    """Return a path as causes name it: ``spec.containers[0].name``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def json_type(value: object) -> str:
    """Return the name of a value's type in JSON."""
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _PYTHON_TYPES.items() if isinstance(value, types)), "null")


def quoted(value: object) -> str:
    """Return a value as messages show it."""
    return msgspec.json.encode(value).decode()
