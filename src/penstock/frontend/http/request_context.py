"""Request context of aiohttp routes: the request's id, its body within limits, and fields for the access log."""

import asyncio
from typing import Any

from aiohttp import web

from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.request_gate import RequestGate

KEEP_ALIVE = 75.0
"""Seconds that an idle client connection stays open; nginx's default."""
LINGER = 1.0
"""Seconds that the rest of a refused body is read and thrown away, so that the client can read the answer."""
BODY_TIMEOUT = 60.0
"""Seconds that a body has to arrive: a slow client must not hold a place for ever."""

GATE: web.AppKey[RequestGate] = web.AppKey("gate", RequestGate)
_key: Any = getattr(web, "RequestKey", web.AppKey)  # older versions of the library know only one kind of key
REQUEST_ID: Any = _key("request_id", str)
"""Under this key a request holds its id."""
CALLER: Any = _key("caller", str)
"""Under this key a request holds the name of its key, or its address."""
FIELDS: Any = _key("fields", dict)
"""Under this key a request holds the additional fields of its line in the access log."""


def gate_of(request: web.Request) -> RequestGate:
    return request.app[GATE]


async def read_body(request: web.Request) -> bytes:
    """Read the whole body.

    Raises:
        ClientError: 413 where it is larger than the limit; a larger content-length is refused without reading. 400
            where the client stopped in the middle, 408 where it takes longer than `BODY_TIMEOUT`.
    """
    limit = gate_of(request).settings.limits.body_max
    length = request.content_length
    if length is not None and length > limit:
        raise too_large(limit)
    if length is None and not request.can_read_body:
        return b""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for data in request.content.iter_any():
                size += len(data)
                if size > limit:
                    raise too_large(limit)
                parts.append(data)
    except TimeoutError:
        text = f"the body did not arrive within {BODY_TIMEOUT:g} s"
        raise rejected(text, code="body_timeout", status=408) from None
    except (web.RequestPayloadError, ConnectionResetError) as error:
        raise rejected(f"the body could not be read: {error}", code="invalid_body") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(limit: int) -> Exception:
    """Make the 413."""
    return rejected(f"the body has more than {limit} bytes", code="body_too_large", status=413)


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """Answer ``Expect: 100-continue``: continue, unless the announced body is too large."""
    if request.headers.get("expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="only 100-continue is understood")
    length = request.content_length
    limit = gate_of(request).settings.limits.body_max
    if length is None or length <= limit:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Bytes written here are no part of the answer's size, on which the error handling relies.
        request.writer.output_size = 0
    return None
