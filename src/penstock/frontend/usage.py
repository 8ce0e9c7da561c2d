"""What does an unary answer say of its tokens and its end? Reads these and nothing else of it."""

from collections.abc import Collection
from typing import Any

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Ends(msgspec.Struct):
    choices: list[_Choice] = []


_decoder = msgspec.json.Decoder(_Answer)
_ends = msgspec.json.Decoder(_Ends)


def usage_of(body: bytes) -> dict[str, Any] | None:
    """Return the usage object of an answer, or None where it has none or is no JSON."""
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def gave_up(body: bytes, reasons: Collection[str]) -> bool:
    """Tell whether the engine dropped a request instead of ending its answer; ``reasons`` are its words for that."""
    for reason in reasons:
        if f'"{reason}"'.encode() in body:
            break
    else:
        return False  # nearly always: one search instead of a second reading
    try:
        return any(choice.finish_reason in reasons for choice in _ends.decode(body).choices)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return False
