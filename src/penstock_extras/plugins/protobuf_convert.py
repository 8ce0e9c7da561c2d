"""Protobuf conversion: structs to messages and back, field by field of the same name; absent stays None.

A test compares the fields of both, so that a new field of a struct can't be left out.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.kernel.values import EngineLimits, Pool, RequestShape

T = TypeVar("T")

_STRUCT = "google.protobuf.Struct"
_BESIDE: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "Prediction": ("shape", RequestShape),
    "Pool": ("pool", Pool),
    "Engine": ("limits", EngineLimits),
}
"""Message -> the struct that ours has as this field, and whose fields stand beside the others in the message."""


class ConversionError(ValueError):
    """A message does not fit: a wrong type, a number out of range, a missing field."""


def fill(into: Any, source: Any) -> Any:
    """Put a struct's fields (or a mapping's) into a message and return the message.

    None is left out; a name that the message does not have is our bug.
    """
    given = dict(source) if isinstance(source, Mapping) else _struct_fields(source)
    fields = into.DESCRIPTOR.fields_by_name
    inner = _BESIDE.get(into.DESCRIPTOR.name)
    if inner is not None:
        given |= {name: value for name, value in _struct_fields(given.pop(inner[0])).items() if name in fields}
    for name, value in given.items():
        if value is None:
            continue
        field = fields[name]
        if field.message_type is None:
            if field.is_repeated:
                getattr(into, name).extend(value)
            elif field.enum_type is not None:
                setattr(into, name, number_of(field.enum_type, value))
            else:
                setattr(into, name, value)
        elif field.message_type.GetOptions().map_entry:
            _fill_map(getattr(into, name), field, value)
        elif field.message_type.full_name == _STRUCT:
            _fill_struct(getattr(into, name), value)
        elif name == "quantiles":
            for rank, rates in value.items():
                getattr(into, name).add(rank=rank, rates=rates)
        elif field.is_repeated:
            for item in value:
                fill(getattr(into, name).add(), item)
        else:
            below = getattr(into, name)
            below.SetInParent()  # present even where everything in it is zero
            fill(below, value)
    return into


def _struct_fields(source: Any) -> dict[str, Any]:
    return {name: getattr(source, name) for name in source.__struct_fields__}


def plain(message: Any) -> dict[str, Any]:
    """Return a message as plain data: every field by name, absent ones as None."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        name = field.name
        value = getattr(message, name)
        if field.message_type is None:
            if field.is_repeated:
                fields[name] = list(value)
            elif field.enum_type is not None:
                fields[name] = enum_name_of(field.enum_type, value)
            else:
                fields[name] = value if not field.has_presence or message.HasField(name) else None
        elif field.message_type.GetOptions().map_entry:
            deep = field.message_type.fields_by_name["value"].message_type is not None
            fields[name] = {key: plain(each) if deep else each for key, each in value.items()}
        elif field.message_type.full_name == _STRUCT:
            fields[name] = _plain_struct(value)
        elif name == "quantiles":
            fields[name] = {each.rank: tuple(each.rates) for each in value}
        elif field.is_repeated:
            fields[name] = [plain(each) for each in value]
        else:
            fields[name] = plain(value) if message.HasField(name) else None
    inner = _BESIDE.get(message.DESCRIPTOR.name)
    if inner is not None:
        fields[inner[0]] = {name: fields.pop(name) for name in inner[1].__struct_fields__ if name in fields}
    return fields


def struct_of(given: Any, kind: type[T]) -> T:
    """Return a message, or its plain data, as one of our structs.

    Raises:
        ConversionError: it does not fit.
    """
    try:
        return msgspec.convert(given if isinstance(given, Mapping) else plain(given), kind)
    except msgspec.ValidationError as error:
        raise ConversionError(str(error)) from None


def number_of(enum: Any, name: str) -> int:
    """Return an enum's number for our word: ``predict`` is ``STAGE_PREDICT``, ``at_least`` is ``AT_LEAST``."""
    for value in enum.values:
        if _enum_name(enum, value.name) == name:
            number: int = value.number
            return number
    raise ValueError(f"{enum.name} has no {name}")


def enum_name_of(enum: Any, number: int) -> str:
    """Return our word for an enum's number; an unknown number gives its digits, which fit nothing."""
    value = enum.values_by_number.get(number)
    return str(number) if value is None else _enum_name(enum, value.name)


_WORDS = {"HOLD_LAST": "hold_last"}
"""Words of ours that begin like their enum's name."""


def _enum_name(enum: Any, name: str) -> str:
    short: str = _WORDS.get(name) or name.lower().removeprefix(f"{enum.name.lower()}_")
    return short


def _fill_map(into: Any, field: Any, value: Mapping[Any, Any]) -> None:
    if field.message_type.fields_by_name["value"].message_type is None:
        into.update(value)
        return
    for key, each in value.items():
        fill(into[key], each)


def _fill_struct(into: Any, value: Mapping[str, Any]) -> None:
    from google.protobuf import json_format

    into.SetInParent()
    if value:
        json_format.ParseDict(msgspec.to_builtins(value, str_keys=True), into)


def _plain_struct(value: Any) -> dict[str, Any]:
    from google.protobuf import json_format

    try:
        fields: dict[str, Any] = json_format.MessageToDict(value)
    except (ValueError, json_format.SerializeToJsonError) as error:
        raise ConversionError(f"facts hold what JSON has no word for: {error}") from None
    return fields
