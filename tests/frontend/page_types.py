"""Types of the page's scripts: TypeScript declarations, derived from the structs that the page reads.

``python -m tests.frontend.page_types > src/penstock/page/browser/types.d.ts`` writes them; a test fails when
they are stale.
"""

import json
import sys
from typing import Any

import msgspec

from penstock.frontend.admin.admin_api import ADMIN_ROUTES
from penstock.kernel.values import JsonObject
from penstock.page.page_schema import Page
from penstock.runtime.records.timeline_view import RecordedColumns

ASKED = (
    "/admin/status",
    "/admin/explain/{request}",
    "/admin/requests",
    "/admin/decisions",
    "/admin/timeline",
    "/admin/timeline/workers",
    "/admin/timeline/workers/{worker}",
    "/admin/planner/decisions",
)
"""Admin routes that the page asks."""
HEAD = "// Made by `python -m tests.frontend.page_types`; a test fails when it is stale.\n"


def declarations() -> str:
    """Return the declarations of the page's schema, and of the answers that it asks for."""
    answers = {route.path: route.answers[0] for route in ADMIN_ROUTES if route.method == "GET"}
    kinds = [Page, RecordedColumns, *(answers[path] for path in ASKED)]
    _, components = msgspec.json.schema_components(kinds, ref_template="{name}")
    return HEAD + "".join(f"\nexport type {name} = {_type(schema)};\n" for name, schema in sorted(components.items()))


def _type(schema: JsonObject, indent: str = "") -> str:
    """Return a JSON Schema as a type of TypeScript."""
    match schema:
        case {"$ref": name}:
            return str(name)
        case {"enum": values}:
            return " | ".join(json.dumps(value) for value in values)
        case {"anyOf": kinds}:
            return " | ".join(dict.fromkeys(_type(kind, indent) for kind in kinds))
        case {"type": "integer" | "number"}:
            return "number"
        case {"type": "string" | "boolean" | "null" as kind}:
            return str(kind)
        case {"type": "array", "prefixItems": parts}:
            return f"[{', '.join(_type(part, indent) for part in parts)}]"
        case {"type": "array", "items": dict(item)}:
            return f"({_type(item, indent)})[]" if "anyOf" in item or "enum" in item else f"{_type(item, indent)}[]"
        case {"type": "object", "properties": fields} if fields:
            needed = schema.get("required", ())
            inner = [_field(name, kind, name in needed, f"{indent}  ") for name, kind in fields.items()]
            return "\n".join(["{", *inner, f"{indent}}}"])
        case {"type": "object", "additionalProperties": dict(kind)}:
            return f"{{[name: string]: {_type(kind, indent)}}}"
    return "any"


def _field(name: str, kind: Any, needed: bool, indent: str) -> str:
    key = name if name.isidentifier() else json.dumps(name)
    return f"{indent}{key}{'' if needed else '?'}: {_type(kind, indent)};"


if __name__ == "__main__":
    sys.stdout.write(declarations())
