"""Patches of objects in all their forms, and the JSON paths by which fields of an object are found."""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import jsonpatch
import jsonpointer
import msgspec

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request, unsupported_media_type

_STEP = re.compile(
    r"\.(?P<field>(?:\\.|[^.\[\\])+)|\[(?P<index>-?\d+)\]|(?P<all>\[\*\])|\['(?P<quoted>[^']+)'\]"
    r"|\[\?\(@(?P<where>(?:\.[\w-]+)+)\s*(?P<sign>==|!=)\s*[\"'](?P<value>[^\"']*)[\"']\)\]"
)


def values_at(item: object, path: str) -> list[object]:
    """Return all values at a path such as ``.status.conditions[?(@.type=="Ready")].status``.

    Raises:
        ValueError: the path is none that this reads.
    """
    values, position = [item], 0
    path = path if path.startswith((".", "[")) else f".{path}"
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ValueError(f"the JSONPath {path!r} is not understood from {path[position:]!r} on")
        position = step.end()
        values = [child for value in values for child in _children(value, step)]
    return values


def first_at(item: object, path: str) -> object:
    """Return the first value at a path, or None."""
    return next(iter(values_at(item, path)), None)


def _children(value: object, step: re.Match[str]) -> list[object]:
    name = step["quoted"] or (step["field"] or "").replace("\\", "")
    if name:
        return [value[name]] if isinstance(value, dict) and name in value else []
    if step["all"]:
        return list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else [])
    if not isinstance(value, list):
        return []
    if step["index"] is not None:
        return value[int(step["index"]) :][:1]
    equal = step["sign"] == "=="
    return [each for each in value if (first_at(each, step["where"]) == step["value"]) == equal]


JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

Resolve = Callable[[JsonObject], JsonObject]
"""Returns a schema, or the one that it refers to."""


def patched(item: JsonObject, media_type: str, body: bytes, schema: JsonObject | None, resolve: Resolve) -> JsonObject:
    """Return an object with a patch applied; a kind without a schema here has no strategic merge patch.

    Raises:
        ApiFailure: 400 or 422 for a patch that can't be applied, 415 for an unknown form.
    """
    try:
        patch = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad_request(f"the patch is not valid JSON: {error}") from error
    if media_type == JSON_PATCH:
        return _json_patched(item, patch)
    if not isinstance(patch, dict):
        raise bad_request("the patch is not a JSON object")
    if media_type == MERGE_PATCH:
        merged: JsonObject = merge_patched(item, patch)
        return merged
    if media_type == STRATEGIC_MERGE_PATCH and schema is not None:
        changed: JsonObject = _strategic(item, patch, schema, resolve)
        return changed
    raise unsupported_media_type(media_type)


def merge_patched(item: Any, patch: Any) -> Any:
    """Return an object with a merge patch applied (RFC 7386): None removes, lists are replaced."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(item) if isinstance(item, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patched(merged.get(name), value)
    return merged


def _json_patched(item: JsonObject, patch: Any) -> JsonObject:
    try:
        changed: JsonObject = jsonpatch.JsonPatch(patch).apply(deepcopy(item))
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as error:
        text = f"the server rejected our request due to an error in our request: {error}"
        raise ApiFailure(422, "Invalid", text) from error
    return changed


def _strategic(item: Any, patch: JsonObject, schema: JsonObject, resolve: Resolve) -> Any:
    schema = resolve(schema)
    merged = dict(item) if isinstance(item, dict) else {}
    properties = schema.get("properties") or {}
    for name, value in patch.items():
        if name.startswith("$"):
            continue  # the order of a list's items, and which fields stay: nobody here depends on them
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged_field(merged.get(name), value, properties.get(name) or {}, resolve)
    return merged


def _merged_field(current: Any, value: Any, schema: JsonObject, resolve: Resolve) -> Any:
    if isinstance(value, list):
        if schema.get("x-kubernetes-patch-strategy") != "merge":
            return value
        key = schema.get("x-kubernetes-patch-merge-key")
        if key is None:
            return [*(current or []), *(each for each in value if each not in (current or []))]
        return _merged_list(current or [], value, key, schema.get("items") or {}, resolve)
    if isinstance(value, dict):
        return _strategic(current, value, schema, resolve)
    return value


def _merged_list(
    current: Sequence[JsonObject], patch: Sequence[JsonObject], key: str, schema: JsonObject, resolve: Resolve
) -> list[JsonObject]:
    merged = list(current)
    for each in patch:
        if not isinstance(each, dict) or key not in each:
            raise bad_request(f"map: {each} does not contain declared merge key: {key}")
        index = next((i for i, item in enumerate(merged) if item.get(key) == each[key]), None)
        if each.get("$patch") == "delete":
            merged = [item for item in merged if item.get(key) != each[key]]
        elif index is None:
            merged.append(_strategic({}, each, schema, resolve))
        else:
            merged[index] = _strategic(merged[index], each, schema, resolve)
    return merged
