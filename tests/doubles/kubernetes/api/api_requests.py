"""Requests to the API server's double: path, query, and bodies in protobuf, as kubectl sends what it creates itself."""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import bad_request, unsupported_media_type
from tests.doubles.kubernetes.objects.api_store import Predicate, field_predicate, label_predicate

MAGIC = b"k8s\x00"
MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
MESSAGES = {
    "Unknown": "typeMeta:TypeMeta=1 raw:bytes=2 contentEncoding=3 contentType=4",
    "TypeMeta": "apiVersion=1 kind=2",
    "ObjectMeta": (
        "name=1 generateName=2 namespace=3 uid=5 resourceVersion=6 generation:int=7 labels:map=11 annotations:map=12 "
        "finalizers:*str=14"
    ),
    "Namespace": "metadata:ObjectMeta=1",
    "ConfigMap": "metadata:ObjectMeta=1 data:map=2 binaryData:bytemap=3 immutable:bool=4",
    "Secret": "metadata:ObjectMeta=1 data:bytemap=2 type=3 stringData:map=4 immutable:bool=5",
    "ServiceAccount": "metadata:ObjectMeta=1",
    "TokenRequest": "metadata:ObjectMeta=1 spec:TokenSpec=2",
    "TokenSpec": "audiences:*str=1 expirationSeconds:int=4",
    "DeleteOptions": "gracePeriodSeconds:int=1 orphanDependents:bool=3 propagationPolicy=4 dryRun:*str=5",
}
"""Fields by their numbers, as the published definitions of Kubernetes have them: those that kubectl's commands fill."""
_FIELDS: dict[str, dict[int, tuple[str, str]]] = {name: {} for name in MESSAGES}
for _name, _text in MESSAGES.items():
    for _field in _text.split():
        _head, _, _number = _field.partition("=")
        _FIELDS[_name][int(_number)] = (_head.partition(":")[0], _head.partition(":")[2])


def read_protobuf(body: bytes) -> JsonObject:
    """Return the object of a body in protobuf.

    Raises:
        ApiFailure: 415 for a kind that the table does not have.
    """
    head = _message(body[len(MAGIC) :], "Unknown")
    names = head["typeMeta"]
    if names.get("kind") not in MESSAGES:
        raise unsupported_media_type(f"{MEDIA_TYPE} of a {names.get('kind')}")
    return {**names, **_message(head.get("raw", b""), names["kind"])}


def _message(data: bytes, name: str) -> JsonObject:
    result: JsonObject = {}
    for number, value in _wire(data):
        field, kind = _FIELDS[name].get(number, ("", ""))
        if not field:
            continue
        if kind in ("map", "bytemap"):
            key, raw = (dict(_wire(value)).get(each, b"") for each in (1, 2))
            text = raw.decode() if kind == "map" else base64.b64encode(raw).decode()
            result.setdefault(field, {})[key.decode()] = text
        elif kind.startswith("*"):
            result.setdefault(field, []).append(_value(value, kind[1:]))
        elif value != b"" or kind in _FIELDS:
            result[field] = _value(value, kind)
    return result


def _value(value: Any, kind: str) -> Any:
    match kind:
        case "" | "str":
            return value.decode()
        case "bytes" | "int":
            return value
        case "bool":
            return bool(value)
    return _message(value, kind)


def _wire(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: numbers, and bytes of text and of messages."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, position = _varint(data, position)
            yield tag >> 3, data[position : position + length]
            position += length
        else:
            raise unsupported_media_type(f"{MEDIA_TYPE}, wire type {tag & 7}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        shift, position = shift + 7, position + 1
        if byte < 128:
            return value, position


_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class ApiPath(msgspec.Struct, frozen=True):
    """What a path names."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def read_path(path: str) -> ApiPath | None:
    """Return what a path names, or None where it names no resource."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, parts = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, parts = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2 and parts[2] != "status":
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource = [*parts, "", ""][:3]
    return ApiPath(group, version, plural, namespace, name, subresource)


def verb_of(method: str, path: ApiPath, query: Mapping[str, str]) -> str:
    """Return the verb that access rules name."""
    if method in ("GET", "HEAD"):
        if flag(query, "watch"):
            return "watch"
        return "get" if path.name else "list"
    if method == "DELETE":
        return "delete" if path.name else "deletecollection"
    return _VERBS.get(method, method.lower())


def flag(query: Mapping[str, str], name: str) -> bool:
    """Return whether a query says yes."""
    return query.get(name, "").lower() in ("1", "true")


def number(query: Mapping[str, str], name: str) -> int | None:
    """Return a number of a query, or None where it is absent or empty."""
    text = query.get(name, "")
    if text and not text.isdigit():
        raise bad_request(f'{name}: Invalid value: "{text}": it must be a number')
    return int(text) if text else None


def selection(query: Mapping[str, str], selectable: tuple[str, ...]) -> Predicate:
    """Return whether an object is one that a list or a watch asks for."""
    labels = label_predicate(query.get("labelSelector", ""))
    fields = field_predicate(query.get("fieldSelector", ""), selectable)
    return lambda item: labels(item) and fields(item)
