"""Owners of fields: `metadata.managedFields`, and the server-side apply that respects them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.patches import Resolve

FieldPath = tuple[str, ...]
"""Elements as FieldsV1 writes them: ``f:NAME`` of a map, ``k:{...}`` of an item with keys, ``v:VALUE`` of a set."""

SERVER_FIELDS = {
    ("f:apiVersion",),
    ("f:kind",),
    *(
        ("f:metadata", f"f:{name}")
        for name in (
            *("name", "namespace", "uid", "creationTimestamp", "resourceVersion", "generation", "managedFields"),
            *("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generateName"),
        )
    ),
}
"""Fields that nobody owns."""


class FieldOwner(NamedTuple):
    """Who owns fields, and by which kind of write."""

    manager: str
    operation: str
    subresource: str = ""


Owners = dict[FieldOwner, frozenset[FieldPath]]
"""The fields of each owner."""


class ListKeys:
    """How items of lists are told apart, and which values are owned as a whole."""

    def __init__(self, schema: JsonObject, resolve: Resolve) -> None:
        self.schema = schema
        self.resolve = resolve

    def fields_of(self, item: JsonObject) -> dict[FieldPath, Any]:
        """Return the values of all fields that can have an owner."""
        fields = dict(self._walk(item, self.schema, ()))
        return {
            path: value
            for path, value in fields.items()
            if path[:1] not in SERVER_FIELDS and path[:2] not in SERVER_FIELDS
        }

    def _walk(self, value: Any, schema: JsonObject, path: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
        atomic = schema.get("x-kubernetes-map-type") == "atomic"
        schema = self.resolve(schema)
        if isinstance(value, dict) and value and not atomic:
            for name, child in value.items():
                yield from self._walk(child, property_of(schema, name), (*path, f"f:{name}"))
        elif isinstance(value, list) and value and (element_of := element_namer(schema)):
            for child in value:
                inner = (*path, element_of(child))
                yield inner, None if isinstance(child, dict) else child
                if isinstance(child, dict):
                    yield from self._walk(child, schema.get("items") or {}, inner)
        else:
            yield path, value

    def merged(self, live: Any, applied: Any, schema: JsonObject | None = None) -> Any:
        """Return a live object with what was applied: maps and lists with keys are merged, the rest is replaced."""
        schema = self.schema if schema is None else schema
        atomic = schema.get("x-kubernetes-map-type") == "atomic"
        schema = self.resolve(schema)
        if isinstance(live, dict) and isinstance(applied, dict) and not atomic:
            children = {n: self.merged(live.get(n), value, property_of(schema, n)) for n, value in applied.items()}
            return live | children
        if isinstance(live, list) and isinstance(applied, list) and (element_of := element_namer(schema)):
            items = {element_of(each): each for each in live}
            for each in applied:
                name = element_of(each)
                items[name] = self.merged(items.get(name), each, schema.get("items") or {})
            return list(items.values())
        return applied

    def without(self, value: Any, paths: set[FieldPath], schema: JsonObject | None = None) -> Any:
        """Return a value without some fields; a map or a list that is empty for that goes, too (None)."""
        schema = self.resolve(self.schema if schema is None else schema)
        below: dict[str, set[FieldPath]] = {}
        for path in paths:
            below.setdefault(path[0], set()).add(path[1:])
        if isinstance(value, dict):
            children = {}
            for name, child in value.items():
                inner = below.get(f"f:{name}")
                if inner is not None:
                    child = None if () in inner else self.without(child, inner, property_of(schema, name))
                if child is not None:
                    children[name] = child
            return children or None
        element_of = element_namer(schema)
        if not isinstance(value, list) or element_of is None:
            return value
        items = []
        for each in value:
            inner = below.get(element_of(each), set())
            if () not in inner:
                items.append(self.without(each, inner, schema.get("items") or {}) if inner else each)
        return items or None


def property_of(schema: JsonObject, name: str) -> JsonObject:
    """Return the schema of a map's field; {} where there is none."""
    others = schema.get("additionalProperties")
    known = (schema.get("properties") or {}).get(name)
    return known if known is not None else others if isinstance(others, dict) else {}


def element_namer(schema: JsonObject) -> Callable[[Any], str] | None:
    """Return what names an item of a list in a path, or None for a list that is owned as a whole."""
    match schema.get("x-kubernetes-list-type"):
        case "map":
            keys, items = schema["x-kubernetes-list-map-keys"], schema.get("items") or {}
            return lambda item: "k:" + _key_text(item, keys, items)
        case "set":
            return lambda item: "v:" + msgspec.json.encode(item).decode()
    return None


def _key_text(item: JsonObject, keys: list[str], schema: JsonObject) -> str:
    defaults = {"protocol": "TCP"}
    for name in keys:
        known = (schema.get("properties") or {}).get(name) or {}
        if "default" in known:
            defaults[name] = known["default"]
    found = {name: item.get(name, defaults.get(name)) for name in sorted(keys)}
    return msgspec.json.encode({name: value for name, value in found.items() if value is not None}).decode()


def read_owners(entries: list[JsonObject]) -> Owners:
    """Return the owners that managedFields name."""
    owners = {}
    for entry in entries:
        owner = FieldOwner(entry.get("manager", ""), entry.get("operation", "Update"), entry.get("subresource", ""))
        owners[owner] = frozenset(_paths(entry.get("fieldsV1") or {}, ()))
    return owners


def _paths(tree: Mapping[str, JsonObject], path: FieldPath) -> Iterator[FieldPath]:
    for name, below in tree.items():
        if name == ".":
            yield path
        elif below:
            yield from _paths(below, (*path, name))
        else:
            yield (*path, name)


def write_owners(owners: Owners, api_version: str) -> list[JsonObject]:
    """Return managedFields; an owner without fields is left out."""
    entries = []
    for owner, fields in owners.items():
        if not fields:
            continue
        tree: JsonObject = {}
        for path in sorted(fields):
            node = tree
            for element in path:
                node = node.setdefault(element, {})
            if any(other[: len(path)] == path for other in fields if other != path):
                node["."] = {}
        entry: JsonObject = {"manager": owner.manager, "operation": owner.operation, "apiVersion": api_version}
        entry |= {"fieldsType": "FieldsV1", "fieldsV1": tree}
        entries.append(entry | ({"subresource": owner.subresource} if owner.subresource else {}))
    return sorted(entries, key=lambda entry: (entry["operation"] != "Apply", entry["manager"]))


def owners_after_write(
    owners: Owners, before: Mapping[FieldPath, Any], after: Mapping[FieldPath, Any], owner: FieldOwner
) -> Owners:
    """Return the owners after a plain write: who changed a field owns it, and others do no more."""
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    gone = changed | (before.keys() - after.keys())
    if not gone:
        return owners
    left = {each: fields - gone for each, fields in owners.items()}
    return left | {owner: left.get(owner, frozenset()) | changed}


class ApplyConflict(NamedTuple):
    """A field that another manager owns with another value."""

    owner: str
    field: str


def apply_conflicts(
    owners: Owners, live: Mapping[FieldPath, Any], applied: Mapping[FieldPath, Any], owner: FieldOwner, version: str
) -> list[tuple[ApplyConflict, FieldPath]]:
    """Return the applied fields whose value would change although others own them; ``version`` is the kind's."""
    changed = {path for path, value in applied.items() if path in live and live[path] != value}
    return [
        (ApplyConflict(_owner_text(other, version), field_text(path)), path)
        for other, fields in owners.items()
        if other != owner
        for path in sorted(changed & fields)
    ]


def _owner_text(owner: FieldOwner, version: str) -> str:
    subresource = f' with subresource "{owner.subresource}"' if owner.subresource else ""
    return f'"{owner.manager}"{subresource} using {version}'


def field_text(path: FieldPath) -> str:
    """Return a path as conflicts name it: ``.spec.containers[name="a"].image``."""
    parts = []
    for element in path:
        kind, _, name = element.partition(":")
        if kind == "f":
            parts.append(f".{name}")
        elif kind == "k":
            keys = msgspec.json.decode(name)
            parts.append(
                "[" + ",".join(f"{key}={msgspec.json.encode(value).decode()}" for key, value in keys.items()) + "]"
            )
        else:
            parts.append(f"[={name}]")
    return "".join(parts)
