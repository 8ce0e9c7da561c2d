"""The objects of the API server's double in memory, with one version for all and a bounded history; their selectors."""

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import bad_request, expired

Predicate = Callable[[JsonObject], bool]

_SET_TERM = re.compile(r"^(?P<key>[\w./-]+)\s+(?P<word>in|notin)\s*\((?P<values>[^)]*)\)$")
_EQUAL_TERM = re.compile(r"^(?P<key>[\w./-]+)\s*(?P<sign>==|=|!=)\s*(?P<value>[\w./:-]*)$")
_EXISTS_TERM = re.compile(r"^(?P<no>!?)\s*(?P<key>[\w./-]+)$")
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")


def label_predicate(selector: str) -> Predicate:
    """Return whether an object's labels match a selector such as ``app=vllm,tier in (a, b),!old``."""
    terms = [_label_term(term.strip()) for term in _COMMA_OUTSIDE_BRACKETS.split(selector) if term.strip()]
    return lambda item: all(term(item["metadata"].get("labels") or {}) for term in terms)


def _label_term(term: str) -> Callable[[JsonObject], bool]:
    if match := _SET_TERM.match(term):
        key, inside = match["key"], match["word"] == "in"
        values = {value.strip() for value in match["values"].split(",")}
        return lambda labels: (labels.get(key) in values) == inside
    if match := _EQUAL_TERM.match(term):
        key, value, equal = match["key"], match["value"], match["sign"] != "!="
        return lambda labels: (labels.get(key) == value) == equal
    if match := _EXISTS_TERM.match(term):
        key, wanted = match["key"], not match["no"]
        return lambda labels: (key in labels) == wanted
    raise bad_request(f'unable to parse requirement: found {term!r}, expected a label, "=", "!=", "in" or "notin"')


def matches_label_selector(selector: JsonObject, labels: JsonObject) -> bool:
    """Return whether labels match the `matchLabels` of an object's spec; an empty selector matches everything."""
    return (selector.get("matchLabels") or {}).items() <= labels.items()


def field_predicate(selector: str, supported: Iterable[str]) -> Predicate:
    """Return whether an object's fields match a selector such as ``status.phase!=Running,spec.nodeName=a``.

    Raises:
        ApiFailure: 400 for a field that the kind can't be selected by.
    """
    terms = [
        _field_term(term, {"metadata.name", "metadata.namespace", *supported}) for term in selector.split(",") if term
    ]
    return lambda item: all(term(item) for term in terms)


def _field_term(term: str, supported: set[str]) -> Predicate:
    match = re.match(r"^([^=!]+?)(==|=|!=)(.*)$", term)
    if match is None:
        raise bad_request(f"invalid field selector: {term!r}")
    path, sign, value = match.groups()
    if path not in supported:
        raise bad_request(f'field label not supported: "{path}"')
    return lambda item: (_text_at(item, path) == value) == (sign != "!=")


def _text_at(item: object, path: str) -> str:
    for part in path.split("."):
        item = item.get(part) if isinstance(item, dict) else None
    if isinstance(item, bool):
        return "true" if item else "false"
    return "" if item is None else str(item)


HISTORY = 2000
"""Changes remembered per resource: far more than a test writes while a watch is away, unless it means to."""

ObjectKey = tuple[str, str]
"""Namespace ("" for none) and name."""


class ObjectChange(NamedTuple):
    """One change: what was there before and what is there now (None: nothing)."""

    version: int
    before: JsonObject | None
    after: JsonObject | None


def key_of(item: JsonObject) -> ObjectKey:
    """Return the namespace and the name of an object."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


class ApiStore:
    """Objects per resource. An object that was put in is never changed in place: who changes one puts a copy."""

    def __init__(self, history: int = HISTORY) -> None:
        self.version = 1
        self.on_removal: Callable[[str, JsonObject], None] = lambda table, item: None
        """Called after each removal: what a namespace or a CRD waited for may be gone."""
        self._objects: dict[str, dict[ObjectKey, JsonObject]] = defaultdict(dict)
        self._changes: dict[str, deque[ObjectChange]] = defaultdict(lambda: deque(maxlen=history))
        self._forgotten: dict[str, int] = defaultdict(int)
        self._watchers: dict[str, set[asyncio.Event]] = defaultdict(set)

    def get(self, resource: str, key: ObjectKey) -> JsonObject | None:
        """Return an object, or None."""
        return self._objects[resource].get(key)

    def resources(self) -> list[str]:
        """Return the resources that have objects."""
        return [resource for resource, objects in self._objects.items() if objects]

    def items(self, resource: str, namespace: str = "", version: int | None = None) -> list[JsonObject]:
        """Return the objects of a namespace ("" for all) in order of their keys, as they are now or were at a version.

        Raises:
            ApiFailure: 410 where the history does not reach back to the version.
        """
        objects = self._objects[resource]
        if version is not None and version < self.version:
            objects = dict(objects)
            for change in reversed(self.changes_since(resource, version)):
                key = key_of(change.after or change.before or {})
                if change.before is None:
                    del objects[key]
                else:
                    objects[key] = change.before
        return [objects[key] for key in sorted(objects) if namespace in ("", key[0])]

    def put(self, resource: str, item: JsonObject) -> JsonObject:
        """Store an object under a new version, and return it with that version."""
        key = key_of(item)
        self.version += 1
        item = item | {"metadata": item["metadata"] | {"resourceVersion": str(self.version)}}
        before = self._objects[resource].get(key)
        self._objects[resource][key] = item
        self._record(resource, ObjectChange(self.version, before, item))
        return item

    def remove(self, resource: str, key: ObjectKey) -> JsonObject:
        """Remove an object, and return its last state with the version of its removal."""
        before = self._objects[resource].pop(key)
        self.version += 1
        item = before | {"metadata": before["metadata"] | {"resourceVersion": str(self.version)}}
        self._record(resource, ObjectChange(self.version, item, None))
        self.on_removal(resource, item)
        return item

    def changes_since(self, resource: str, version: int) -> list[ObjectChange]:
        """Return the changes after a version.

        Raises:
            ApiFailure: 410 where the history does not reach back to it.
        """
        if version < self._forgotten[resource]:
            raise expired(version, self._forgotten[resource])
        return [change for change in self._changes[resource] if change.version > version]

    def forget(self) -> None:
        """Drop the history, as a compaction does: a watch from an earlier version is answered with 410."""
        self.version += 1
        for resource in {*self._changes, *self._objects, *self._watchers}:
            self._changes[resource].clear()
            self._forgotten[resource] = self.version
        self.wake_all()

    def wake_all(self) -> None:
        """Let all watches look whether they should end."""
        self._wake({*self._watchers})

    def watcher(self, resource: str) -> "ObjectWatch":
        """Return what wakes a watch of a resource; use it as a context."""
        return ObjectWatch(self._watchers[resource])

    def _record(self, resource: str, change: ObjectChange) -> None:
        changes = self._changes[resource]
        if len(changes) == changes.maxlen:
            self._forgotten[resource] = changes[0].version
        changes.append(change)
        self._wake({resource})

    def _wake(self, resources: set[str]) -> None:
        for event in self._events(resources):
            event.set()

    def _events(self, resources: set[str]) -> Iterator[asyncio.Event]:
        for resource in resources:
            yield from self._watchers[resource]


class ObjectWatch:
    """Wakes one watch when its resource changes."""

    def __init__(self, events: set[asyncio.Event]) -> None:
        self._events = events
        self._event = asyncio.Event()

    def __enter__(self) -> "ObjectWatch":
        self._events.add(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        self._events.discard(self._event)

    async def wait(self, timeout_s: float) -> None:
        """Return after a change, or after a while."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()
