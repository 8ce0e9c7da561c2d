"""Request guard of routed requests: API key, rate, in-flight limit, errors in one shape, one access log line.

The same for every HTTP server: it knows a request only as an `HttpExchange`.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from penstock.frontend import logs
from penstock.frontend.http.api_keys import Unauthorized, bearer
from penstock.frontend.http.error_responses import ErrorResponse, problem, problem_of, send_error
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.request_gate import RequestGate
from penstock.kernel.errors import OverloadedError, PenstockError

access_log = logging.getLogger("penstock.access")
log = logging.getLogger("penstock.frontend")

Handler = Callable[[HttpExchange], Awaitable[None]]

CLIENT_GONE = 499
"""Status in the log of a request whose client hung up; it is never sent."""


async def serve(gate: RequestGate, caller: HttpExchange, handler: Handler) -> None:
    """Check a request, have it answered, and write its line in the log however that ends."""
    started = time.monotonic()
    try:
        refusal = _admit(gate, caller)
        if refusal is not None:
            return await caller.send(refusal.status, refusal.body, refusal.headers, close=True)
        gate.enter()
        try:
            await handler(caller)
        finally:
            gate.leave()
    except Unauthorized as error:
        gate.metrics.unauthorized.add()
        answer = problem_of(error)
        await caller.send(answer.status, answer.body, {**answer.headers, "www-authenticate": error.challenge})
    except PenstockError as error:
        await send_error(caller, problem_of(error))
    except ConnectionResetError:
        raise
    except Exception:  # supervision boundary: one request's bug must not leak its details nor end the process
        log.exception("request %s failed by a bug of ours", caller.id)
        if caller.begun:
            caller.abort()  # half an answer must not look like a whole one
        else:
            await send_error(caller, internal())
    finally:
        status = caller.status
        if status is None:
            status = CLIENT_GONE
            gate.metrics.disconnected.add()
        log_line(caller.method, caller.path, caller.id, status, started, caller.name, caller.fields)


def _admit(gate: RequestGate, caller: HttpExchange) -> ErrorResponse | None:
    """Check who asks, and whether there is room; return the answer of a process that is ending.

    Raises:
        Unauthorized, OverloadedError: the request is not answered.
    """
    caller.name = identified(gate, caller.headers, caller.remote)
    if gate.draining:
        return problem(503, "this endpoint is shutting down", code="draining", retry_after=1.0)
    try:
        gate.rates.take(caller.name)
    except OverloadedError:
        gate.metrics.rate_limited.add()
        raise
    most = gate.settings.limits.inflight_max
    if gate.inflight >= most:
        raise OverloadedError(f"{most} requests are in flight, which is the limit", retry_after=1.0, status=429)
    return None


def internal() -> ErrorResponse:
    """Make the answer to a request that our own bug ended."""
    return problem(500, "an internal error; the log has it under this request's id", code="internal")


def identified(gate: RequestGate, headers: Mapping[str, str], remote: str | None) -> str:
    """Return the caller's name: that of the key, or the address where no keys are set.

    Raises:
        Unauthorized: keys are set and the request has none of them.
    """
    if not gate.keys:
        return remote or "local"
    name = gate.keys.name(bearer(headers))
    if name is None:
        missing = "authorization" not in headers
        raise Unauthorized(
            "send an API key as 'Authorization: Bearer KEY'" if missing else "this API key is not known",
            'Bearer realm="penstock"',
        )
    return name


def log_line(
    method: str,
    path: str,
    id: str,
    status: int,
    started: float,
    caller: str | None,
    fields: Mapping[str, object],
    level: int = logging.INFO,
) -> None:
    """Write a request's line in the access log; ``started`` is of `time.monotonic`."""
    if not access_log.isEnabledFor(level):
        return
    details = {
        "request": id,
        "status": status,
        "seconds": round(time.monotonic() - started, 6),
        "caller": caller,
        **fields,
    }
    handler = logs.direct()
    if handler is not None:
        handler.log_line(logging.getLevelName(level).lower(), access_log.name, f"{method} {printable(path)}", details)
    else:
        access_log.log(level, "%s %s", method, printable(path), extra={"fields": details})


def printable(path: str) -> str:
    """Return a path in a form for a log line or a message."""
    return path if path.isprintable() and len(path) <= 200 else ascii(path)[:200]
