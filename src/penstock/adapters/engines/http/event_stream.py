"""Event stream: server-sent events as the WHATWG standard frames them, whatever ends their lines."""

import json
import re

import msgspec

from penstock.kernel.values import JsonObject

DONE = b"[DONE]"
"""The data of the event that ends a stream of OpenAI's API."""
BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
"""What a whole event ends with: each line ends with CR LF, LF or CR, by itself."""
_BLANK = re.compile(rb"\n(?:\n|\r(?:\n|(?=[^\n])))|\r\r\n?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELDS = frozenset({b"", b"event", b"data", b"id", b"retry"})
"""Fields of the standard; a comment is a line whose field has no name."""


def split_events(data: bytes) -> list[bytes]:
    """Return the events of a stream, each with the blank line that ends it, and last what has no such line yet."""
    events: list[bytes] = []
    start = 0
    for blank in _BLANK.finditer(data):
        events.append(data[start : blank.end()])
        start = blank.end()
    events.append(data[start:])
    return events


def payload_of(event: bytes) -> bytes:
    """Return the data of an event, its lines joined, without space around it; b"" where it has none, as a comment."""
    if event.startswith(b"data:"):
        payload = event[5:].strip()
        if b"\n" not in payload and b"\r" not in payload:
            return payload  # nearly every event
    lines = event.removeprefix(_BYTE_ORDER_MARK).splitlines()
    return b"\n".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]).strip()


def is_named_error(event: bytes) -> bool:
    """Return whether an event's own name says that it is an error."""
    return any(line[6:].strip() == b"error" for line in event.splitlines() if line.startswith(b"event:"))


def stray_text(event: bytes) -> bytes:
    """Return the lines of an event that are no field of the standard: the text of a server that failed within it."""
    lines = event.removeprefix(_BYTE_ORDER_MARK).splitlines()
    return b"\n".join([line for line in lines if line and line.partition(b":")[0] not in _FIELDS])


def object_in(data: bytes) -> JsonObject | None:
    """Return the JSON object that data is, or None where it is something else.

    What other writers of JSON make and the standard has not is read, too: a byte-order mark, NaN as null, and signs for
    bytes that are no UTF-8 and for halves of a surrogate pair.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        try:
            value = json.loads(data.decode("utf-8-sig", "replace"), parse_constant=lambda name: None)
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        except (RecursionError, ValueError):
            return None
    return value if isinstance(value, dict) else None


def chunks_of(events: bytes) -> list[JsonObject]:
    """Return the JSON objects that whole events hold; others, and choices that are none, are left out."""
    chunks = [chunk for event in split_events(events) if (chunk := object_in(payload_of(event))) is not None]
    for chunk in chunks:
        if choices := chunk.get("choices"):
            chunk["choices"] = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    return chunks
