"""What happens around every request? Its id, one line in the log, limits, keys, and errors in one shape."""

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from penstock.frontend.access import Unauthorized, basic_password, bearer, check_admin
from penstock.frontend.context import CALLER, FIELDS, REQUEST_ID, service_of
from penstock.frontend.errors import error_response, response_of
from penstock.kernel.errors import OverloadedError, PenstockError

access_log = logging.getLogger("penstock.access")
log = logging.getLogger("penstock.frontend")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_GONE = 499
"""Status in the log of a request whose client hung up; it is never sent."""
_QUIET = frozenset({"/health", "/live", "/metrics", "/admin/status"})
"""Asked every few seconds by machines: only in the log at level debug."""


@web.middleware
async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn errors into answers, and write its line in the log."""
    service = service_of(request)
    request[REQUEST_ID] = service.request_id(request.headers)
    started = time.monotonic()
    status = CLIENT_GONE
    try:
        response = await _answered(request, handler)
        status = response.status
        return response
    finally:
        if status == CLIENT_GONE:
            service.metrics.disconnected.add()
        level = logging.DEBUG if request.path in _QUIET and status < 500 else logging.INFO
        if access_log.isEnabledFor(level):
            fields = {
                "request": request[REQUEST_ID],
                "status": status,
                "seconds": round(time.monotonic() - started, 6),
                "caller": request.get(CALLER),
                **request.get(FIELDS, {}),
            }
            access_log.log(level, "%s %s", request.method, _printable(request.path), extra={"fields": fields})


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Unauthorized as error:
        service_of(request).metrics.unauthorized.add()
        response = response_of(error)
        response.headers["www-authenticate"] = error.challenge
        return response
    except PenstockError as error:
        response = response_of(error)
        if response.status in (408, 413):
            response.force_close()  # what is still coming of the body is not read
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allowed = error.headers.get("allow")
        return error_response(
            error.status,
            f"{request.method} {_printable(request.path)}: {error.reason}",
            code="not_found" if error.status == 404 else None,
            headers={"allow": allowed} if allowed else None,
        )
    except ConnectionResetError:
        raise
    except Exception:  # supervision boundary: one request's bug must not show its insides nor end the process
        log.exception("request %s failed by a bug of ours", request[REQUEST_ID])
        return error_response(500, "an internal error; the log has it under this request's id", code="internal")


def for_clients(handler: Handler) -> Handler:
    """Guard a route that uses engines: a valid key where keys are set, its rate, requests in flight, draining."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        service = service_of(request)
        identify(request)
        if service.draining:
            response = error_response(503, "this endpoint is shutting down", code="draining", retry_after=1.0)
            response.force_close()
            return response
        try:
            service.rates.take(request[CALLER])
        except OverloadedError:
            service.metrics.rate_limited.add()
            raise
        most = service.settings.frontend.limits.inflight_max
        if service.inflight >= most:
            raise OverloadedError(f"{most} requests are in flight, which is the limit", retry_after=1.0, status=429)
        service.enter()
        try:
            return await handler(request)
        finally:
            service.leave()

    return guarded


def with_key(handler: Handler) -> Handler:
    """Guard a route that only needs a valid key, where keys are set."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        identify(request)
        return await handler(request)

    return guarded


def identify(request: web.Request) -> None:
    """Find out who calls.

    Raises:
        Unauthorized: keys are set and this is none of them.
    """
    service = service_of(request)
    if not service.keys:
        request[CALLER] = request.remote or "local"
        return
    name = service.keys.name(bearer(request.headers))
    if name is None:
        missing = "authorization" not in request.headers
        raise Unauthorized(
            "send an API key as 'Authorization: Bearer KEY'" if missing else "this API key is not known",
            'Bearer realm="penstock"',
        )
    request[CALLER] = name


def for_admins(handler: Handler) -> Handler:
    """Guard a route that shows or changes the cluster's inside."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        service = service_of(request)
        check_admin(
            service.admin_keys,
            request.headers,
            remote=request.remote,
            host=request.headers.get("host", "localhost"),
            method=request.method,
        )
        name = service.admin_keys.name(bearer(request.headers)) or service.admin_keys.name(
            basic_password(request.headers)
        )
        request[CALLER] = name or "local"
        return await handler(request)

    return guarded


async def mark_response(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's id on its answer; called before the headers go out."""
    found = request.get(REQUEST_ID)
    if found is not None:
        response.headers["x-request-id"] = found
        response.headers["x-penstock-request-id"] = found
    response.headers["server"] = "penstock"


def _printable(path: str) -> str:
    return path if path.isprintable() and len(path) <= 200 else ascii(path)[:200]
