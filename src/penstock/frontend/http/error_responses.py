"""Error responses: one JSON shape, OpenAI's, for every failure."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from penstock.frontend.http.http_exchange import HttpExchange
from penstock.kernel.errors import ClientError, OverloadedError, PenstockError

QUOTED_MAX = 100
"""Characters of a client's text that an error repeats."""
NEEDLESS_TO_READ_ON = (408, 413)
"""Statuses after which the rest of the body is not read, so the connection ends."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    412: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    502: "engine_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    """Return the error object.

    Args:
        code: short machine-readable word; None takes one from the status.
        param: the field at fault.
        kind: ``error.type``; None takes one from the status.
    """
    if kind is None:
        kind = _KINDS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or kind.removesuffix("_error")}}


class ErrorResponse(NamedTuple):
    """A whole answer that reports an error."""

    status: int
    body: bytes
    headers: dict[str, str]


def problem(
    status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
) -> ErrorResponse:
    """Make the answer; ``retry_after`` is in seconds."""
    headers = {"content-type": "application/json; charset=utf-8"}
    if retry_after is not None:
        headers["retry-after"] = seconds_text(retry_after)
    return ErrorResponse(status, msgspec.json.encode(error_body(status, message, code=code, param=param)), headers)


def seconds_text(retry_after: float) -> str:
    """Return a Retry-After: whole seconds, at least one."""
    return str(max(1, math.ceil(retry_after)))


def problem_of(error: PenstockError) -> ErrorResponse:
    """Return the answer for one of our exceptions, by its class."""
    if isinstance(error, ClientError):
        return problem(error.status, str(error), code=error.code, param=error.param)
    if isinstance(error, OverloadedError):
        answer = problem(error.status, str(error), code=error.code, param=error.param, retry_after=error.retry_after)
        answer.headers.update(error.headers)
        return answer
    return problem(502, str(error), code="engine_error")


async def send_error(
    caller: HttpExchange, error: ErrorResponse, headers: Mapping[str, str] | None = None, *, close: bool = False
) -> None:
    """Answer with an error."""
    close = close or error.status in NEEDLESS_TO_READ_ON
    await caller.send(error.status, error.body, {**error.headers, **(headers or {})}, close=close)


def response_of(error: ErrorResponse, headers: dict[str, str] | None = None) -> web.Response:
    """Return an error as a response of the aiohttp server."""
    return web.Response(status=error.status, body=error.body, headers={**error.headers, **(headers or {})})


def sse_error(status: int, message: str, *, code: str | None = None) -> bytes:
    """Return the event that ends a stream which broke after its first token."""
    return b"data: " + msgspec.json.encode(error_body(status, message, code=code)) + b"\n\n"


def quoted(text: str) -> str:
    """Return a client's text for an error message: printable, and cut where it is long."""
    return repr(text) if len(text) <= QUOTED_MAX else f"{text[:QUOTED_MAX]!r}... ({len(text)} characters)"


def rejected(
    message: str, param: str | None = None, *, code: str = "invalid_request", status: int = 400
) -> ClientError:
    """Make the error for a request that is not passed on."""
    return ClientError(message, status=status, code=code, param=param)
