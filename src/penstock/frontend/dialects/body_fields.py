"""Body fields of another API's request: read with their type, refused by name, passed on where they are a chat's."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject

T = TypeVar("T")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMES: dict[type, str] = {str: "text", list: "a list", dict: "an object", bool: "a boolean", int: "a whole number"}


def field_of(fields: JsonObject, name: str, kind: type[T], where: str = "") -> T | None:
    """Return a field that may be absent or null.

    Raises:
        ClientError: 400: it is of another type.
    """
    value = fields.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise rejected(f"{where}{name} must be {_NAMES[kind]}", f"{where}{name}")


def needed(fields: JsonObject, name: str, kind: type[T], where: str = "") -> T:
    """Return a field that must be there.

    Raises:
        ClientError: 400: it is absent, or of another type.
    """
    value = field_of(fields, name, kind, where)
    if value is None:
        raise rejected(f"you must give {where}{name}", f"{where}{name}", code="missing_field")
    return value


def objects_of(value: Iterable[object], where: str) -> list[JsonObject]:
    """Return a list of objects.

    Raises:
        ClientError: 400: one of them is something else.
    """
    objects: list[JsonObject] = []
    for position, item in enumerate(value):
        if not isinstance(item, dict):
            raise rejected(f"{where}[{position}] must be an object", f"{where}[{position}]")
        objects.append(item)
    return objects


def unserved(what: str, where: str, hint: str) -> ClientError:
    """Make the refusal of something that only the vendor's own service has."""
    return rejected(f"{quoted(what)} is not served here: {hint}", where, code="unsupported_value")


def refuse(fields: JsonObject, names: Mapping[str, str]) -> None:
    """Refuse fields that would have an effect which nobody here can give; ``names``: field -> why.

    Raises:
        ClientError: 400: one of them is set.
    """
    for name, why in names.items():
        if fields.get(name):
            raise unserved(name, name, why)


def leave_out(left_out: list[str], field: str, kind: str = "") -> None:
    """Note, once, what has no effect here; the answer names it in a header, so a ``kind`` of other signs is not."""
    name = f"{field}.{kind}" if _WORD.fullmatch(kind) else field
    if name not in left_out:
        left_out.append(name)


def name_ignored(
    fields: JsonObject,
    ignored: Mapping[str, Sequence[object] | None],
    inner: Mapping[str, Collection[str]],
    left_out: list[str],
) -> None:
    """Note the fields without an effect that a request sets.

    Args:
        ignored: field -> values that ask for what is done anyway; None where every value does.
        inner: object -> its fields that have an effect; others are noted.
    """
    for name, usual in ignored.items():
        if usual is not None and fields.get(name) and fields[name] not in usual:
            leave_out(left_out, name)
    for name, known in inner.items():
        for key, value in (field_of(fields, name, dict) or {}).items():
            if key not in known and value is not None:
                leave_out(left_out, name, key)


def passed_on(fields: JsonObject, own: Collection[str]) -> JsonObject:
    """Return the fields that are not the API's ``own``: a chat's, such as ``seed`` or ``nvext``, or an engine's."""
    return {name: value for name, value in fields.items() if name not in own}


def set_fields(**fields: object) -> JsonObject:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
