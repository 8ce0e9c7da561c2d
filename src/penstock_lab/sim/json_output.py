"""JSON output of the simulated engine: the smallest text that a schema accepts, made without a model."""

import json
from typing import Any

_DEPTH_MAX = 16


def least_json(schema: Any) -> str:
    """Return the smallest JSON text of a schema's shape, as far as the common keywords go."""
    return json.dumps(_least_value(schema, schema, 0), ensure_ascii=True, separators=(",", ":"))


def _least_value(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _DEPTH_MAX:
        return None if depth > _DEPTH_MAX else {}
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _least_value(_resolve(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return _least_value(schema[key][0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or (kind is None and "properties" in schema):
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return {}
        wanted = schema.get("required")
        names = [n for n in wanted if n in properties] if isinstance(wanted, list) and wanted else list(properties)
        return {name: _least_value(properties[name], root, depth + 1) for name in names}
    if kind == "array":
        count = schema.get("minItems", 0)
        return [_least_value(schema.get("items", {}), root, depth + 1) for _ in range(min(int(count), 64))]
    if kind == "string":
        return "water" + "r" * min(4096, max(0, int(schema.get("minLength", 0)) - 5))
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    return {}


def _resolve(reference: str, root: Any) -> Any:
    schema = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if not isinstance(schema, dict):
            return {}
        schema = schema.get(part, {})
    return schema
