"""Selectors of lists and watches: by labels, as kubectl writes them, and by fields."""

import re
from collections.abc import Callable, Iterable

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import bad_request

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
    """Return whether labels match a `LabelSelector` of an object's spec; an empty one matches everything."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.get("matchExpressions") or []:
        value, values = labels.get(each["key"]), each.get("values") or []
        fits = {"In": value in values, "NotIn": value not in values, "Exists": value is not None}
        if not fits.get(each["operator"], value is None):
            return False
    return True


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
