"""`Knob` and `Settings`: a room declares each of its settings once, with unit, range and a sentence of help.

A room's settings are a frozen ``msgspec.Struct`` whose fields are ``Annotated[type, Knob(...)] = default``.
`penstock.config` derives flags, environment names, JSON Schema and the docs table from that, and a test fails on a
field without a `Knob`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

Unit = Literal["s", "bytes", "tokens", "blocks", "requests", "ratio", "count", "ms", "1/s", "bytes/s"]


@dataclass(frozen=True, slots=True)
class Knob:
    """One sentence on what a setting does and what gets better or worse as it grows; its unit and range.

    Args:
        help: one sentence, shown by ``--help``, the schema and the docs table.
        unit: base unit of the number; text such as ``200ms``, ``64GiB`` or ``8k`` is converted to it.
        ge, gt, le, lt: allowed range, in that unit.
        live: True where a running cluster may change it.
        secret: True where the value must never be written to a run folder, a log or the page.
    """

    help: str
    unit: Unit | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    live: bool = False
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One derived knob: where it stands, its type without the annotation, its default and its `Knob`."""

    name: str
    type: Any
    default: Any
    knob: Knob | None

    @property
    def is_group(self) -> bool:
        """Whether it is a nested settings struct; a struct that has a `Knob` itself is one knob, a mapping."""
        return self.knob is None and is_group(self.type)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every room's settings."""


def fields_of(settings: type[msgspec.Struct]) -> list[Field]:
    """List the knobs of a settings struct in the order of their declaration.

    A field that is itself a `Settings` struct has ``knob=None`` and its struct as ``type``.
    """
    hints = get_type_hints(settings, include_extras=True)
    found: list[Field] = []
    for info in msgspec.structs.fields(settings):
        hint = hints[info.name]
        knob: Knob | None = None
        if get_origin(hint) is Annotated:
            hint, *metadata = get_args(hint)
            knob = next((m for m in metadata if isinstance(m, Knob)), None)
        default: Any = info.default
        if info.default_factory is not msgspec.NODEFAULT:
            default = info.default_factory()
        found.append(Field(info.name, hint, default, knob))
    return found


def is_group(hint: Any) -> bool:
    """Tell whether a field's type is a nested settings struct."""
    return isinstance(hint, type) and issubclass(hint, Settings)


def or_word(hint: Any) -> tuple[Any, str | None]:
    """Return (``T``, word) for ``T | Literal[word]``, such as a number that may be ``auto``; else (the type, None)."""
    arguments = get_args(hint)
    if get_origin(hint) is not Literal and len(arguments) == 2 and get_origin(arguments[1]) is Literal:
        return arguments[0], get_args(arguments[1])[0]
    return hint, None


def without_none(hint: Any) -> Any:
    """Return ``T`` for ``T | None``, else the type itself."""
    if get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint
