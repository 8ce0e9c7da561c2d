"""Converts one typed text to the value of its knob, or gives the reason why it can't."""

import json
from typing import Any, Literal, get_args, get_origin

from penstock.config.derived.knobs import type_text
from penstock.config.reading.problems import did_you_mean
from penstock.config.reading.text_tree import TreeScalar
from penstock.config.reading.units import UnreadableNumber, parse_number
from penstock.kernel.settings import Knob, Unit, or_word, without_none

_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")


class UnreadableValue(ValueError):
    """A value does not fit its type; ``hint`` is the next step, where there is one."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


def read_value(typed: Any, hint: Any, knob: Knob) -> Any:
    """Return the value of a knob of type ``hint``, ranges not yet checked.

    Args:
        typed: a `TreeScalar`, or lists and dicts of them; other values are passed on unchanged.
    Raises:
        UnreadableValue: it does not fit.
    """
    plain = without_none(hint)
    if typed is None and plain is not hint:
        return None  # the default of a list that may be unset
    if isinstance(typed, TreeScalar) and typed.is_null:
        if plain is hint:
            raise UnreadableValue("has no value", f"it takes {_an(type_text(hint))}, or leave the key out")
        return None
    origin = get_origin(plain)
    if origin in (tuple, list):
        items = _items(typed)
        if items is None:
            raise UnreadableValue(f"takes a {type_text(plain)}")
        read = [read_value(item, get_args(plain)[0], knob) for item in items]
        return tuple(read) if origin is tuple else read
    if origin is dict:
        entries = typed if isinstance(typed, dict) else None
        if entries is None:
            raise UnreadableValue(f"takes a {type_text(plain)}")
        return {key: read_value(item, get_args(plain)[1], knob) for key, item in entries.items()}
    if isinstance(typed, TreeScalar):
        return _read_scalar(typed.text, plain, knob.unit)
    if isinstance(typed, list | dict) and _holds_scalars(typed):
        raise UnreadableValue(
            f"takes {_an(type_text(plain))}, not {'a list' if isinstance(typed, list) else 'a mapping'}"
        )
    return typed


def _read_scalar(text: str, hint: Any, unit: Unit | None) -> Any:
    hint, word = or_word(hint)
    if word is not None and text.strip() == word:
        return word
    if hint is str:
        return text
    if hint is bool:
        word = text.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise UnreadableValue("takes true or false")
    if get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in get_args(hint)}
        if text in choices:
            return choices[text]
        raise UnreadableValue(f"takes {type_text(hint)}", did_you_mean(text, choices))
    if hint in (int, float):
        try:
            number = parse_number(text, unit)
        except UnreadableNumber as error:
            raise UnreadableValue(str(error)) from None
        if hint is float:
            return float(number)
        if isinstance(number, float) and not number.is_integer():
            raise UnreadableValue("must be a whole number")
        return int(number)
    raise TypeError(f"no text can be read as {hint}")


def _items(typed: Any) -> list[Any] | None:
    """Return the parts of a list; one text is a JSON list or names between commas, as in flags and environment."""
    if isinstance(typed, list | tuple):
        return list(typed)
    if not isinstance(typed, TreeScalar):
        return None
    text = typed.text.strip()
    if text.startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = text.removeprefix("[").removesuffix("]").split(",")
        return [TreeScalar(str(part).strip(), quoted=True) for part in parts]
    return [TreeScalar(part.strip(), quoted=True) for part in text.split(",") if part.strip()]


def _holds_scalars(typed: Any) -> bool:
    values = typed.values() if isinstance(typed, dict) else typed
    return all(isinstance(value, TreeScalar | list | dict) for value in values)


def _an(words: str) -> str:
    if words.startswith(("one of", "true", "text")):
        return words
    return f"a {words}"
