"""Messages of Envoy's ext_proc v3 in protobuf's encoding: just the fields that a picker reads and writes.

Source: envoy/service/ext_proc/v3/external_processor.proto. The tests hold this to the compiled messages of xds-protos.
"""

import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = range(2, 8)
"""Field numbers of a `ProcessingRequest`; those of the answers are one less."""
METADATA, ATTRIBUTES, PROTOCOL = 8, 9, 11
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, DUPLEX = range(5)
"""Modes of a body."""
CHUNK_MAX = 62_000
"""Bytes of a body in one answer: Envoy takes messages of 64 KiB."""
DEPTH_MAX = 8
"""Deepest nesting of metadata that is read."""

REPEATED = frozenset(
    (
        *(":authority", ":method", ":path", ":scheme", ":status", "accept", "accept-encoding", "connection"),
        *("content-length", "content-type", "date", "server", "user-agent", "x-forwarded-proto"),
    )
)
"""Names of headers whose values come again and again, and are no secrets."""
KNOWN_MAX = 4096
"""Headers that are remembered, of all connections together: a few hundred kilobytes."""

_PARTS = frozenset(kind << 3 | 2 for kind in range(REQUEST_HEADERS, RESPONSE_TRAILERS + 1))
_DOUBLE = struct.Struct("<d")


class BadMessage(Exception):
    """A message is not protobuf, or not the one that it should be."""


class GatewayMessage(NamedTuple):
    """A `ProcessingRequest`: which of its kinds it is, and the bytes of that part."""

    kind: int
    part: bytes
    metadata: bytes
    """Of the stream, where there is any; attributes are in front of it, in the same form."""
    modes: tuple[int, int] | None
    """Modes of the request's and the answer's body, in a stream's first message."""


class HeadersPart(NamedTuple):
    """Headers of a request or an answer; names are in lower case."""

    headers: dict[str, str]
    end_of_stream: bool


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise BadMessage("a number is too long")


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: number, and its value as a number or as bytes."""
    at, size = 0, len(data)
    while at < size:
        tag, at = _read_varint(data, at)
        wire = tag & 7
        if wire == 2:
            length, at = _read_varint(data, at)
            if at + length > size:
                raise BadMessage("a field is longer than its message")
            yield tag >> 3, data[at : at + length]
            at += length
        elif wire == 0:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise BadMessage(f"wire type {wire}")


def read_message(data: bytes) -> GatewayMessage:
    """Read a `ProcessingRequest`.

    Raises:
        BadMessage: it is none.
    """
    size = len(data)
    if size > 1 and data[0] in _PARTS and data[1] < 128 and data[1] + 2 == size:  # short, and nothing beside its part
        return GatewayMessage(data[0] >> 3, data[2:], b"", None)
    kind, part, metadata = 0, b"", b""
    modes: tuple[int, int] | None = None
    try:
        for number, value in _read_fields(data):
            if isinstance(value, int):
                continue
            if REQUEST_HEADERS <= number <= RESPONSE_TRAILERS:
                kind, part = number, value
            elif number == METADATA:
                metadata += value
            elif number == ATTRIBUTES:
                metadata += _put_field(1, value)  # a map of the same structs, but not in a message of its own
            elif number == PROTOCOL:
                given = dict(_read_fields(value))
                request, response = given.get(1, 0), given.get(2, 0)
                modes = (request if isinstance(request, int) else 0, response if isinstance(response, int) else 0)
    except IndexError:
        raise BadMessage("the message is cut off") from None
    return GatewayMessage(kind, part, metadata, modes)


def read_headers(part: bytes) -> HeadersPart:
    """Read `HttpHeaders`.

    Raises:
        BadMessage: they are none.
    """
    try:
        usual = _usual_headers(part)
    except (IndexError, UnicodeDecodeError):
        usual = None
    try:
        return usual or _any_headers(part)
    except (IndexError, UnicodeDecodeError):
        raise BadMessage("headers are cut off or are not text") from None


def _usual_headers(part: bytes) -> HeadersPart | None:
    """Read headers as Envoy writes them, names and raw values, in one loop; None where anything else is there."""
    if not part or part[0] != 0x0A:
        return None
    headers: dict[str, str] = {}
    known = _known_headers
    length, at = _read_varint(part, 1)
    end = at + length
    while at < end:
        size = part[at + 1]
        start = at + 2
        if size > 127:
            size, start = _read_varint(part, at + 1)
        stop = start + size
        entry = part[at:stop]
        header = known.get(entry) or _usual_header(entry, start - at)
        if header is None:
            return None
        headers[header[0]] = header[1]
        at = stop
    rest = part[end:]
    return HeadersPart(headers, bool(rest)) if at == end and rest in (b"", b"\x18\x01") else None


_known_headers: dict[bytes, tuple[str, str]] = {}
"""Headers as they were read once, by their bytes: most of a request's are those of the one before."""


def _usual_header(entry: bytes, start: int) -> tuple[str, str] | None:
    """Read one header, whose name begins at ``start`` with its tag; None where it has another form."""
    middle = start + 2 + entry[start + 1]
    value, begin = _read_varint(entry, middle + 1)
    usual = entry[0] == entry[start] == 0x0A and entry[start + 1] < 128 and entry[middle] == 0x1A
    if not usual or begin + value != len(entry):
        return None
    header = entry[start + 2 : middle].decode(), entry[begin:].decode("latin-1")
    if header[0] in REPEATED:
        if len(_known_headers) >= KNOWN_MAX:
            _known_headers.clear()
        _known_headers[entry] = header
    return header


def _any_headers(part: bytes) -> HeadersPart:
    headers: dict[str, str] = {}
    end = False
    for number, value in _read_fields(part):
        if number == 3:
            end = bool(value)
        elif number == 1 and isinstance(value, bytes):
            for _, header in _read_fields(value):
                fields = dict(_read_fields(_as_bytes(header)))
                headers[_as_bytes(fields.get(1)).decode()] = _as_bytes(fields.get(3) or fields.get(2)).decode("latin-1")
    return HeadersPart(headers, end)


def read_body(part: bytes) -> tuple[bytes, bool]:
    """Read `HttpBody`: its bytes, and whether they are the last.

    Raises:
        BadMessage: it is none.
    """
    size = len(part)
    if size > 1 and part[0] == 0x0A and part[1] < 128:  # the usual short one
        if part[1] + 2 == size:
            return part[2:], False
        if part[1] + 4 == size and part[size - 2] == 0x10:
            return part[2 : size - 2], part[size - 1] == 1
    body, end = b"", False
    try:
        for number, value in _read_fields(part):
            if number == 1 and isinstance(value, bytes):
                body = value
            elif number in (2, 3):
                end = end or bool(value)
    except IndexError:
        raise BadMessage("a body is cut off") from None
    return body, end


def read_metadata(data: bytes, namespace: str, key: str) -> object:
    """Return one value of the stream's metadata: text, a list and so on; None where it is not there.

    Raises:
        BadMessage: it is no `Metadata`.
    """
    try:
        for number, entry in _read_fields(data):
            if number == 1 and isinstance(entry, bytes):
                fields = dict(_read_fields(entry))
                if fields.get(1) == namespace.encode():
                    return _struct(_as_bytes(fields.get(2)), 0).get(key)
    except (IndexError, UnicodeDecodeError, struct.error):
        raise BadMessage("metadata is cut off or is not text") from None
    return None


def _as_bytes(value: int | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""


def _struct(data: bytes, depth: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for number, entry in _read_fields(data):
        if number == 1 and isinstance(entry, bytes):
            fields = dict(_read_fields(entry))
            values[_as_bytes(fields.get(1)).decode()] = _read_value(_as_bytes(fields.get(2)), depth + 1)
    return values


def _read_value(data: bytes, depth: int) -> object:
    if depth > DEPTH_MAX:
        raise BadMessage("metadata is nested too deeply")
    for number, value in _read_fields(data):
        if number == 2:
            return float(_DOUBLE.unpack(_as_bytes(value))[0])
        if number == 3:
            return _as_bytes(value).decode()
        if number == 4:
            return bool(value)
        if number == 5:
            return _struct(_as_bytes(value), depth)
        if number == 6:
            return [
                _read_value(_as_bytes(one), depth + 1) for place, one in _read_fields(_as_bytes(value)) if place == 1
            ]
    return None


# --- answers --------------------------------------------------------------------------------------------------------


def _length(size: int) -> bytes:
    if size < 128:
        return bytes((size,))
    out = bytearray()
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def _put_field(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _length(len(value)) + value


@lru_cache(4096)
def _set_header(name: str, value: str) -> bytes:
    """Encode one `HeaderValueOption` that replaces what is there (append_action = 2)."""
    header = _put_field(1, name.encode()) + _put_field(3, value.encode("latin-1", "replace"))
    return _put_field(1, _put_field(1, header) + b"\x18\x02")


def mutation(headers: Mapping[str, str]) -> bytes:
    """Encode a `HeaderMutation` that sets these headers."""
    return b"".join([_set_header(name, value) for name, value in headers.items()])


def headers_answer(kind: int, headers: Mapping[str, str], *, reroute: bool = False) -> bytes:
    """Encode the answer to headers of a kind; ``reroute`` lets the gateway choose its route by the new headers."""
    common = _put_field(2, mutation(headers)) if headers else b""
    return _put_field(kind - 1, _put_field(1, common + (b"\x28\x01" if reroute else b"")))


@lru_cache(4096)
def lb_metadata(key: str, value: str) -> bytes:
    """Encode dynamic metadata: one text under ``envoy.lb``."""
    inner = _put_field(1, _put_field(1, key.encode()) + _put_field(2, _put_field(3, value.encode())))
    return _put_field(8, _put_field(1, _put_field(1, b"envoy.lb") + _put_field(2, _put_field(5, inner))))


def echo(kind: int, part: bytes) -> bytes:
    """Encode the answer that passes a chunk on unchanged: `StreamedBodyResponse` has the form of `HttpBody`."""
    size = len(part)
    if size < 122:  # all four lengths are of one byte
        return bytes((kind - 1 << 3 | 2, size + 6, 0x0A, size + 4, 0x1A, size + 2, 0x1A, size)) + part
    streamed = b"\x1a" + _length(size)
    body = b"\x1a" + _length(size + len(streamed))
    common = b"\x0a" + _length(size + len(streamed) + len(body))
    whole = _length(size + len(streamed) + len(body) + len(common))
    return b"".join((bytes((kind - 1 << 3 | 2,)), whole, common, body, streamed, part))


def body_chunks(kind: int, body: bytes, *, last: bool) -> Iterator[bytes]:
    """Encode the answers that pass a whole body on; ``last``: no trailers follow."""
    for at in range(0, len(body), CHUNK_MAX) or (0,):
        end = last and at + CHUNK_MAX >= len(body)
        yield echo(kind, _put_field(1, body[at : at + CHUNK_MAX]) + (b"\x10\x01" if end else b""))


def body_answer(kind: int, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Encode the answer to a whole body of mode BUFFERED; ``body``: in its place."""
    common = _put_field(2, mutation(headers)) if headers else b""
    if body is not None:
        common += _put_field(3, _put_field(1, body))
    return _put_field(kind - 1, _put_field(1, common + b"\x28\x01"))


def empty_answer(kind: int) -> bytes:
    """Encode the answer that changes nothing."""
    return _put_field(kind - 1, b"")


def immediate_answer(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    """Encode an `ImmediateResponse`: the gateway answers the client with this."""
    code = b"\x08" + _length(status)
    return _put_field(7, _put_field(1, code) + _put_field(2, mutation(headers)) + _put_field(3, body))
