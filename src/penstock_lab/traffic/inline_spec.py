"""Parses an inline spec such as ``sinusoid:amplitude=0.5,period=1h``: a kind and its settings in one line of text.

A kind is a frozen struct whose fields are declared with `Knob`s, as a room's settings are: their names, units, ranges
and defaults are those of the text. Numbers with units are read by a function that is handed in, since the config
room, which has it, lies above this one.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import Knob, Unit, fields_of

ReadNumber = Callable[[str, Unit | None], float]
"""Text and unit -> number in that unit; raises a ValueError that says what is wrong, as `config.reading.units` does."""
Kind = TypeVar("Kind", bound=msgspec.Struct)


def parse(what: str, text: str, kinds: Mapping[str, type[Kind]], number: ReadNumber) -> Kind:
    """Return the kind that a text names, with its settings.

    Args:
        what: the option or field that the text is the value of, for errors.
        text: ``kind`` or ``kind:name=value,name=value``.
        kinds: name -> struct; fields are floats or ints with a `Knob`.

    Raises:
        ConfigError: names the option, the setting, its value and what would be right.
    """
    name, colon, rest = text.strip().partition(":")
    kind = kinds.get(name)
    if kind is None:
        raise ConfigError(f"{what} {text!r}: there is no kind {name!r}", hint=_nearest_of(name, list(kinds)))
    knobs = {field.name: field for field in fields_of(kind)}
    values: dict[str, float | int] = {}
    for pair in rest.split(",") if colon else []:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in knobs:
            raise ConfigError(f"{what} {text!r}: {name} has no setting {key!r}", hint=_nearest_of(key, list(knobs)))
        if not equals or not value:
            raise ConfigError(f"{what} {text!r}: {key} has no value", hint=f"write {key}=VALUE")
        if key in values:
            raise ConfigError(f"{what} {text!r}: {key} stands there twice", hint="leave one of them out")
        field = knobs[key]
        assert field.knob is not None, f"{name}.{key} is declared without a Knob"
        values[key] = _value_of(f"{what} {text!r}: {key}={value}", value, field.type, field.knob, number)
    for key, field in knobs.items():
        if field.default is msgspec.NODEFAULT and key not in values:
            raise ConfigError(f"{what} {text!r}: {name} needs {key}", hint=f"write {name}:{key}=VALUE")
    return kind(**values)


def _value_of(where: str, text: str, hint: Any, knob: Knob, number: ReadNumber) -> float | int:
    try:
        value: float | int = number(text, knob.unit)
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from error
    if hint is int:
        if value != int(value):
            raise ConfigError(f"{where} is not a whole number")
        value = int(value)
    if (
        (knob.ge is not None and not value >= knob.ge)
        or (knob.gt is not None and not value > knob.gt)
        or (knob.le is not None and not value <= knob.le)
        or (knob.lt is not None and not value < knob.lt)
    ):
        raise ConfigError(f"{where} is out of range", hint=f"{_range_text(knob)}; {knob.help}")
    return value


def _range_text(knob: Knob) -> str:
    low = f"at least {knob.ge:g}" if knob.ge is not None else f"above {knob.gt:g}" if knob.gt is not None else ""
    high = f"at most {knob.le:g}" if knob.le is not None else f"below {knob.lt:g}" if knob.lt is not None else ""
    return " and ".join(part for part in (low, high) if part)


def _nearest_of(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if not known:
        return "it has none"
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
