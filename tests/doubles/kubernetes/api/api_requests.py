"""Requests of the API, read from path and query: which verb on which resource, and with which options."""

from collections.abc import Mapping

import msgspec

from tests.doubles.kubernetes.objects.api_failures import bad_request
from tests.doubles.kubernetes.objects.selectors import Predicate, field_predicate, label_predicate

READS = {"get", "list", "watch"}
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class ApiPath(msgspec.Struct, frozen=True):
    """What a path names."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    rest: str = ""
    """What follows a subresource such as ``proxy``."""


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
    if parts[0] == "namespaces" and len(parts) > 2 and parts[2] not in ("status", "finalize"):
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource, *rest = [*parts, "", ""][: max(3, len(parts))]
    return ApiPath(group, version, plural, namespace, name, subresource, "/".join(rest))


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
