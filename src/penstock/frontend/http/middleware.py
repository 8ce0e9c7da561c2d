"""Middleware of the aiohttp server's routes: request id, access log line, keys, and errors in one shape."""

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from penstock.frontend.http.api_keys import Unauthorized, basic_password, bearer, check_admin
from penstock.frontend.http.error_responses import NEEDLESS_TO_READ_ON, ErrorResponse, problem, problem_of, response_of
from penstock.frontend.http.request_context import CALLER, FIELDS, REQUEST_ID, gate_of
from penstock.frontend.http.request_gate import (
    CLIENT_GONE,
    identify,
    internal,
    log_line,
    printable,
)
from penstock.kernel.errors import PenstockError
from penstock.runtime.cluster_state.peer_signature import HEADER

log = logging.getLogger("penstock.frontend")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_QUIET = frozenset(
    {
        *("/health", "/live", "/metrics", "/admin/status", "/admin/desired", "/admin/planner/seen"),
        *("/admin/timeline", "/admin/timeline/workers", "/admin/decisions", "/admin/requests"),
    }
)
"""Paths that probes and the page request every few seconds: only in the log at level debug."""


@web.middleware
async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn errors into answers, and write its line in the log."""
    gate = gate_of(request)
    doubt = _doubtful(request)
    if doubt is not None:
        refused = response_of(doubt)
        refused.force_close()
        return refused
    request[REQUEST_ID] = gate.request_id(request.headers)
    gate.bookkeeping.enter()  # what these routes show is complete
    started = time.monotonic()
    status = CLIENT_GONE
    try:
        response = await _answer_or_refuse(request, handler)
        status = response.status
        return response
    finally:
        if status == CLIENT_GONE:
            gate.metrics.disconnected.add()
        level = logging.DEBUG if request.path in _QUIET and status < 500 else logging.INFO
        fields = request.get(FIELDS, {})
        log_line(request.method, request.path, request[REQUEST_ID], status, started, request.get(CALLER), fields, level)


def _doubtful(request: web.Request) -> ErrorResponse | None:
    """Refuse requests that the library accepts and another server may read differently: their end would be in doubt."""
    if not (1, 0) <= request.version <= (1, 1):
        return problem(505, "this server speaks HTTP/1.1", code="invalid_http")
    if hdrs.TRANSFER_ENCODING in request.headers and hdrs.CONTENT_LENGTH in request.headers:
        return problem(400, "a length and a transfer encoding contradict each other", code="invalid_http")
    return None


async def _answer_or_refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
    def refusal(error: ErrorResponse, headers: dict[str, str] | None = None) -> web.Response:
        return response_of(gate_of(request).shaped(error, request.path, request[REQUEST_ID]), headers)

    cors = gate_of(request).cors
    if cors is not None and (preflight := cors.preflight(request.method, request.path, request.headers)):
        return web.Response(status=204, headers=preflight)
    try:
        return await handler(request)
    except Unauthorized as error:
        gate_of(request).metrics.unauthorized.add()
        return refusal(problem_of(error), {"www-authenticate": error.challenge})
    except PenstockError as error:
        response = refusal(problem_of(error))
        if response.status in NEEDLESS_TO_READ_ON:
            response.force_close()
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allowed = error.headers.get("allow")
        text = f"{request.method} {printable(request.path)}: {error.reason}"
        answer = problem(error.status, text, code="not_found" if error.status == 404 else None)
        return refusal(answer, {"allow": allowed} if allowed else None)
    except ConnectionResetError:
        raise
    except Exception:  # supervision boundary: one request's bug must not leak its details nor end the process
        log.exception("request %s failed by a bug of ours", request[REQUEST_ID])
        return refusal(internal())


def with_key(handler: Handler) -> Handler:
    """Guard a route that needs a valid key, where keys are set."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        request[CALLER] = await identify(gate_of(request), request.headers, request.remote)
        return await handler(request)

    return guarded


def for_admins(handler: Handler) -> Handler:
    """Guard a route that shows or changes the cluster's state."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        gate = gate_of(request)
        host = request.headers.get("host", "localhost")
        if gate.peer_guard.admits(request.headers.get(HEADER), request.method, host, request.raw_path):
            request[CALLER] = "peer"
            return await handler(request)
        check_admin(
            gate.admin_keys,
            request.headers,
            remote=request.remote,
            host=host,
            method=request.method,
        )
        name = gate.admin_keys.name(bearer(request.headers)) or gate.admin_keys.name(basic_password(request.headers))
        request[CALLER] = name or "local"
        return await handler(request)

    return guarded


async def mark_response(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's id on its answer; called before the headers go out."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers["x-request-id"] = request_id
        response.headers["x-penstock-request-id"] = request_id
    response.headers["server"] = "penstock"
    if (cors := gate_of(request).cors) is not None:
        response.headers.update(cors.headers(request.path, request.headers))
    # No upgrade is served here, and the library takes later bytes for another protocol.
    if gate_of(request).retiring or hdrs.UPGRADE in request.headers:
        # The header is set here as well: the library has made its own headers by now.
        response.headers["connection"] = "close"
        response.force_close()


async def give_back(request: web.Request, response: web.StreamResponse) -> None:
    """Let aiohttp close with this answer what it was lent; the headers, made by now, are about the real connection."""
    response.force_close()
