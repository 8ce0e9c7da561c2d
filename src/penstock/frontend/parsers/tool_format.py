"""Tool format: how one family of models writes calls of tools into its text, and what that text turns out to be."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.kernel.values import JsonObject


class ContentDelta(NamedTuple):
    """Text for the reader of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class ToolCallDelta(NamedTuple):
    """One whole call.

    Args:
        arguments: a JSON object as text.
    """

    name: str
    arguments: str


ParsedDelta = ContentDelta | ReasoningDelta | ToolCallDelta


def joined(deltas: list[ParsedDelta]) -> list[ParsedDelta]:
    """Return deltas in which texts of one kind that follow each other are one, and empty ones are left out."""
    out: list[ParsedDelta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ToolCallDelta):
            out.append(delta)
        elif not delta.text:
            continue
        elif isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + delta.text)
        else:
            out.append(delta)
    return out


ToolSchemas = Mapping[str, Mapping[str, object]]
"""The request's functions: name -> JSON schema of its parameters."""


class CallsRead(NamedTuple):
    """Result of reading at a marker.

    Args:
        calls: none where what stands there is not a call.
        end: place behind what was read; without calls, behind what can't be one either, or 0.
    """

    calls: tuple[ToolCallDelta, ...] = ()
    end: int = 0


NO_CALL = CallsRead()


class CallReader(Protocol):
    """Reads what stands at one marker, in a text that grows."""

    def read(self, text: str, final: bool) -> CallsRead | None:
        """Return what was read, or None while more text is needed.

        Args:
            text: begins with the marker.
            final: no more text will come.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format."""

    starts: tuple[str, ...]
    """Markers with which a call begins."""
    reader: Callable[[str, ToolSchemas], CallReader]
    """Makes a reader for a marker; it reads one call, or a list of them."""
    wrappers: tuple[str, ...] = ()
    """Texts around calls, which are left out beside a call."""
    bare: tuple[str, ...] = ()
    """Markers that count only where nothing but calls stands before them."""
    behind_text: bool = False
    """Whether they count behind text, too, while that has no bracket, fence or marker of its own."""
    special: bool = False
    """Whether its markers are special tokens, which engines leave out of their text unless asked."""
    id_length: int = 24
    """Characters of a call's id behind its prefix; models whose template checks ids want an exact one."""


def json_value(text: str) -> object:
    """Return the value that a JSON text is, or None where it is none."""
    try:
        return json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
    except (ValueError, RecursionError):
        return None


def json_object(text: str) -> JsonObject | None:
    """Return the JSON object that a text is, or None where it is none."""
    value = json_value(text)
    return value if isinstance(value, dict) else None


def object_text(text: str) -> str | None:
    """Return a JSON object's text, or None where it is no JSON object."""
    value = json_object(text)
    return None if value is None else arguments_text(value)


def arguments_text(arguments: Mapping[str, object]) -> str:
    """Return a call's arguments as the text of a JSON object."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can carry
        return json.dumps(arguments)
    return text


def call_of(value: object, schemas: ToolSchemas | None = None) -> ToolCallDelta | None:
    """Return the call that a JSON object describes by name and arguments; None where it describes none.

    Args:
        schemas: only a call of one of these functions counts, and it has to name its arguments; None takes any, as
            behind a marker, where a call of a function without parameters may leave them out.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and (schemas is None or not value.keys().isdisjoint(("arguments", "parameters"))):
        arguments = {}
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict):
        return None
    if schemas is not None and name not in schemas:
        return None
    return ToolCallDelta(name, arguments_text(arguments))


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # a constant such as NaN, or one that is too large: JSON can say neither
        raise ValueError(f"{text} is not a number of JSON")
    return value
