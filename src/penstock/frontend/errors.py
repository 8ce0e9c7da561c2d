"""What does a caller see when something is wrong? One JSON shape, the OpenAI one, for every failure."""

import math
from typing import Any

import msgspec
from aiohttp import web

from penstock.kernel.errors import ClientError, OverloadedError, PenstockError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
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


def error_response(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after: float | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """Return a whole response; ``retry_after`` is in seconds and rounded up, as the header wants whole ones."""
    response = web.Response(
        status=status,
        body=msgspec.json.encode(error_body(status, message, code=code, param=param)),
        content_type="application/json",
        headers=headers,
    )
    if retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    return response


def response_of(error: PenstockError) -> web.Response:
    """Turn one of our exceptions into the response that its class stands for."""
    if isinstance(error, ClientError):
        return error_response(error.status, str(error), code=error.code, param=error.param)
    if isinstance(error, OverloadedError):
        return error_response(error.status, str(error), code="overloaded", retry_after=error.retry_after)
    return error_response(502, str(error), code="engine_error")


def sse_error(status: int, message: str, *, code: str | None = None) -> bytes:
    """Return the event that ends a stream which broke after its first token."""
    return b"data: " + msgspec.json.encode(error_body(status, message, code=code)) + b"\n\n"


def rejected(
    message: str, param: str | None = None, *, code: str = "invalid_request", status: int = 400
) -> ClientError:
    """Make the error for a request that we do not pass on."""
    return ClientError(message, status=status, code=code, param=param)
