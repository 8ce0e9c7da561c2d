"""Usage of a unary answer: reads its token counts and finish reasons, and nothing else."""

from collections.abc import Collection

import msgspec

from penstock.kernel.values import JsonObject


class _UsageChoice(msgspec.Struct):
    finish_reason: str | None = None


class _UsageAnswer(msgspec.Struct):
    usage: JsonObject | None = None


class _UsageEnds(msgspec.Struct):
    choices: list[_UsageChoice] = []


_decoder = msgspec.json.Decoder(_UsageAnswer)
_ends = msgspec.json.Decoder(_UsageEnds)


def usage_of(body: bytes) -> JsonObject | None:
    """Return the usage object of an answer, or None where it has none or is not JSON."""
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def gave_up(body: bytes, reasons: Collection[str]) -> bool:
    """Return whether the engine dropped a request without ending its answer; ``reasons``: finish reasons for that."""
    for reason in reasons:
        if f'"{reason}"'.encode() in body:
            break
    else:
        return False  # nearly always: one search instead of a second reading
    try:
        return any(choice.finish_reason in reasons for choice in _ends.decode(body).choices)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return False
