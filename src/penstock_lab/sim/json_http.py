"""JSON over HTTP of the simulated server: reads bodies, and writes errors in vLLM's form."""

import msgspec
from aiohttp import web

from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequests", 503: "ServiceUnavailableError"}


async def read_json(request: web.Request) -> JsonObject:
    """Return the body of a request.

    Raises:
        ClientError: it is not a JSON object.
    """
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientError(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ClientError("The body must be a JSON object.")
    return body


def problem(status: int, message: str, param: str | None) -> web.Response:
    """Return an error in vLLM's form."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)
