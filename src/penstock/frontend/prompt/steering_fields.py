"""Steering fields: what of a request would steer an engine's KV, ranks, adapters or internals, kept from clients.

With them a client reads another's KV, has an engine connect where it says, or runs code. None of them passes to an
engine, at any depth of a body, unless the engine's pool names it in ``client_fields``; what is withheld is reported as
a hint without an effect.
"""

import re
from collections.abc import Collection, Mapping
from email.message import Message
from typing import Any

import msgspec

from penstock.config.settings.client_fields import CLIENT_FIELDS, OWN_WORDS, PLAIN_NAMES, STEERING
from penstock.frontend.http.error_responses import rejected
from penstock.kernel.values import JsonObject

_ANSWERED = frozenset({"kv_transfer_params", "ec_transfer_params", "disaggregated_params"})
"""Fields in which engines answer where KV lies."""
_PLACES = re.compile(rb'"(?:%b)"\s*:\s*(?!null\b)\S' % "|".join(sorted(_ANSWERED)).encode())
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES = frozenset(STEERING)
_PLAIN = _NAMES, frozenset[str]()
_RULES = {name: (_NAMES - PLAIN_NAMES, schemas) for name, schemas in OWN_WORDS.items()}
"""Field of a body -> the names to look for below it, and the fields below it that are not looked into."""


def withheld_from(fields: JsonObject) -> tuple[str, ...]:
    """Return the names of the steering fields in a body, sorted; there are none in nearly every request."""
    present = set[str]()
    if not _NAMES.isdisjoint(fields):
        present |= _NAMES & fields.keys()
    for name, value in fields.items():
        if type(value) is dict or (type(value) is list and not (name == "prompt" and value and type(value[0]) is int)):
            names, schemas = _RULES.get(name, _PLAIN)
            if "*" not in schemas:
                _search(value, names, schemas, present)
    return tuple(sorted(present))


def without(raw: bytes, fields: JsonObject, names: Collection[str]) -> tuple[bytes, JsonObject, JsonObject]:
    """Return a body without its steering fields, the same decoded, and those of its top, which a pool may allow."""
    whole: JsonObject = dict(_RAW.decode(raw))
    kept: JsonObject = {}
    for name, value in fields.items():
        if name in names:
            del whole[name]
            continue
        inner, schemas = _RULES.get(name, _PLAIN)
        kept[name] = value if "*" in schemas else _clean(value, inner, schemas)
        if kept[name] != value:
            whole[name] = kept[name]
    return msgspec.json.encode(whole), kept, {name: fields[name] for name in names if name in fields}


def without_parts(raw: bytes, content_type: str) -> tuple[bytes, tuple[str, ...]]:
    """Return a form without the parts that are steering fields, and their names.

    Raises:
        ClientError: 400: it names no boundary.
    """
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if not boundary:
        raise rejected("the form's content-type names no boundary", "content-type", code="invalid_header")
    mark = b"--" + boundary.encode("utf-8", "surrogateescape")
    first, *parts = raw.split(mark)
    named = [(_part_name(part), part) for part in parts]
    names = {name for name, _ in named if name in _NAMES}
    if not names:
        return raw, ()
    return mark.join([first, *(part for name, part in named if name not in names)]), tuple(sorted(names))


def allowed_of(steering: Mapping[str, Any], labels: Mapping[str, str]) -> JsonObject:
    """Return what of a client's steering fields an engine with these labels may get; others within them it may not."""
    allowed: JsonObject = {}
    for entry in labels.get(CLIENT_FIELDS, "").split():
        name, _, inner = entry.partition(".")
        value = steering.get(name)
        if name in steering and not inner:
            allowed[name] = _clean(value, *_PLAIN)
        elif isinstance(value, dict) and inner in value:
            allowed[name] = {**allowed.get(name, {}), inner: _clean(value[inner], *_PLAIN)}
    return allowed


def without_places(answer: bytes) -> bytes:
    """Return an engine's answer, or the data of one event of it, without what says where KV lies.

    In a text its quotes would be escaped. What can't be decoded is returned unchanged: no client's parser reads it.
    """
    if b"_params" not in answer or _PLACES.search(answer) is None:
        return answer
    try:
        return msgspec.json.encode(_clean(msgspec.json.decode(answer), _ANSWERED, frozenset()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return answer


def _part_name(part: bytes) -> str:
    """Return the name of a form's part; empty for what stands behind the last one."""
    message = Message()
    for line in part.partition(b"\r\n\r\n")[0].decode("utf-8", "replace").splitlines():
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            message["content-disposition"] = value.strip()
            break
    name = message.get_param("name", "", "content-disposition")
    return str(name[2] if isinstance(name, tuple) else name)


def _search(value: Any, names: frozenset[str], schemas: frozenset[str], present: set[str]) -> None:
    if type(value) is list:
        for inner in value:
            kind = type(inner)
            # A message of text alone, as nearly all are, has nothing to look into.
            if kind is list or (kind is dict and not (len(inner) == 2 and "role" in inner and _is_text(inner))):
                _search(inner, names, schemas, present)
    elif type(value) is dict:
        if not names.isdisjoint(value):
            present |= names & value.keys()
        for name, inner in value.items():
            if (type(inner) is dict or type(inner) is list) and name not in schemas:
                _search(inner, names, schemas, present)


def _is_text(message: JsonObject) -> bool:
    return type(message.get("content")) is str


def _clean(value: Any, names: frozenset[str], schemas: frozenset[str]) -> Any:
    if type(value) is dict:
        return {
            name: inner if name in schemas else _clean(inner, names, schemas)
            for name, inner in value.items()
            if name not in names
        }
    return [_clean(inner, names, schemas) for inner in value] if type(value) is list else value
