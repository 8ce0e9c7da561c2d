"""What does an unary answer say of its tokens? Reads usage and nothing else of it."""

from typing import Any

import msgspec


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Answer)


def usage_of(body: bytes) -> dict[str, Any] | None:
    """Return the usage object of an answer, or None where it has none or is no JSON."""
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
