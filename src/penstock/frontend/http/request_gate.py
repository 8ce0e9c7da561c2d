"""Request gate: what every request to an engine passes, on both servers: key, rate, limits, errors, its log line."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.config.settings.tenant_settings import TenantSettings
from penstock.frontend import logs
from penstock.frontend.cors_policy import CorsPolicy
from penstock.frontend.http.api_keys import ApiKeys, KeyRates, PeerGuard, Unauthorized, bearer, tenant_keys
from penstock.frontend.http.bookkeeping import Bookkeeping
from penstock.frontend.http.error_responses import ErrorResponse, problem, problem_of, send_error
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.kernel.errors import OverloadedError, PenstockError
from penstock.kernel.plurals import counted
from penstock.router.requests.refusals import DRAINING, INFLIGHT_LIMIT

access_log = logging.getLogger("penstock.access")
log = logging.getLogger("penstock.frontend")

Handler = Callable[[HttpExchange], Awaitable[None]]
Shape = Callable[[ErrorResponse, str], ErrorResponse]
"""Turns an error answer to the request of this id into that of another API."""

CLIENT_GONE = 499
"""Status in the log of a request whose client hung up; it is never sent."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


class RequestGate:
    """One frontend process's gate.

    Args:
        settings: of the start; `use` replaces them.
        tenants: by name.
        routes: paths whose POST goes to an engine; ``{name}`` stands for any one segment.
        new_id: makes the id of a request that names no valid one.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        bookkeeping: Bookkeeping,
        peer_guard: PeerGuard,
        *,
        tenants: Mapping[str, TenantSettings],
        routes: frozenset[str],
        new_id: Callable[[], str],
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.bookkeeping = bookkeeping
        self.peer_guard = peer_guard
        self.keys = ApiKeys(settings.security.api_keys, tenant_keys(tenants))
        self.tenants: dict[str, str] = self.keys.tenants
        """Caller's name -> its tenant; only of those that have one."""
        self.tokens: Callable[[str], Awaitable[str]] | None = None
        """Names the caller of a JWT, where an issuer's are accepted."""
        self.admin_keys = ApiKeys(settings.security.admin_keys)
        self.rates = KeyRates(settings.limits.rate, settings.limits.burst)
        self.shapes: dict[str, Shape] = {}
        """Path -> shape of its errors, where that is not OpenAI's."""
        self.cors: CorsPolicy | None = None
        """Where pages of other origins may call."""
        self.draining = False
        """Whether requests are refused."""
        self.retiring = False
        """Whether a successor accepts the new connections; those that are open here end with their next answer."""
        self.inflight = 0
        """HTTP requests of routed or proxied routes that are being answered."""
        self.idle = asyncio.Event()
        """Set while no request is being answered."""
        self.idle.set()
        self._new_id = new_id
        self._routes = routes
        self._templates = [(_route_pattern(route), route) for route in sorted(routes) if "{" in route]

    def use(self, settings: FrontendSettings) -> None:
        """Use other settings from now on."""
        before, self.settings = self.settings.limits, settings
        limits = settings.limits
        if (limits.rate, limits.burst) != (before.rate, before.burst):
            self.rates = KeyRates(limits.rate, limits.burst)

    def accept(self, tokens: Callable[[str], Awaitable[str]], names: Mapping[str, str]) -> None:
        """Accept an issuer's tokens as well; ``names``: caller's name -> its tenant."""
        self.tokens = tokens
        self.tenants.update(names)
        self.keys.needed = True

    def route(self, path: str) -> str | None:
        """Return the route that a path is of, or None where its requests do not go to engines."""
        if path in self._routes:
            return path
        return next((route for pattern, route in self._templates if pattern.fullmatch(path)), None)

    def enter(self) -> None:
        """Count a request in; `leave` counts it out."""
        self.inflight += 1
        self.idle.clear()

    def leave(self) -> None:
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()

    def take(self, caller: str) -> None:
        """Take one request of a caller's rate.

        Raises:
            OverloadedError: 429: there is none left.
        """
        try:
            self.rates.take(caller)
        except OverloadedError:
            self.metrics.rate_limited.add()
            raise

    def full(self) -> OverloadedError:
        """Make the refusal of a request beyond those in flight."""
        most = self.settings.limits.inflight_max
        text = f"the limit is reached: {counted(most, 'request')} in flight"
        return OverloadedError(text, retry_after=1.0, status=429, code=INFLIGHT_LIMIT)

    def shaped(self, error: ErrorResponse, path: str, request: str) -> ErrorResponse:
        """Return an error of a request as the API of its path has it, at every path below the API's own."""
        for prefix, shape in self.shapes.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return shape(error, request)
        return error

    def request_id(self, headers: Mapping[str, str]) -> str:
        """Return the client's id where it is valid, else a new one."""
        for name in ("x-request-id", "x-dynamo-request-id", "x-penstock-request-id"):
            value = headers.get(name)
            if value is not None and _SANE_ID.match(value):
                return value
        return self._new_id()


def _route_pattern(route: str) -> re.Pattern[str]:
    return re.compile("[^{}/]+".join(re.escape(part) for part in re.split(r"\{\w+\}", route)))


async def serve(gate: RequestGate, caller: HttpExchange, handler: Handler) -> None:
    """Check a request, have it answered, and write its line in the log however that ends."""
    started = time.monotonic()
    try:
        if gate.tokens is None:
            caller.name = identified(gate, caller.headers, caller.remote)
        else:
            caller.name = await identify(gate, caller.headers, caller.remote)
        refusal = _admit_request(gate, caller)
        if refusal is not None:
            return await send_error(caller, gate.shaped(refusal, caller.path, caller.id), close=True)
        gate.enter()
        try:
            await handler(caller)
        finally:
            caller.filters.clear()  # an error that follows is ours, in its API's shape already
            gate.leave()
    except Unauthorized as error:
        gate.metrics.unauthorized.add()
        await send_error(
            caller, gate.shaped(problem_of(error), caller.path, caller.id), {"www-authenticate": error.challenge}
        )
    except PenstockError as error:
        await send_error(caller, gate.shaped(problem_of(error), caller.path, caller.id))
    except ConnectionResetError:
        raise
    except Exception:  # supervision boundary: one request's bug must not leak its details nor end the process
        log.exception("request %s failed by a bug of ours", caller.id)
        if caller.status is not None:
            caller.abort()  # half an answer must not look like a whole one
        else:
            await send_error(caller, gate.shaped(internal(), caller.path, caller.id))
    finally:
        status = caller.status
        if status is None:
            status = CLIENT_GONE
            gate.metrics.disconnected.add()
        log_line(caller.method, caller.path, caller.id, status, started, caller.name, caller.fields)


def _admit_request(gate: RequestGate, caller: HttpExchange) -> ErrorResponse | None:
    """Check whether there is room; return the answer of a process that is ending.

    Raises:
        OverloadedError: the request is not answered.
    """
    if gate.draining:
        return problem(503, "this endpoint is shutting down", code=DRAINING, retry_after=1.0)
    if gate.rates.limited:
        gate.take(caller.name)
    if gate.inflight >= gate.settings.limits.inflight_max:
        raise gate.full()
    return None


def internal() -> ErrorResponse:
    """Make the answer to a request that our own bug ended."""
    return problem(500, "an internal error; the log has it under this request's id", code="internal")


async def identify(gate: RequestGate, headers: Mapping[str, str], remote: str | None) -> str:
    """Return the caller's name as `identified` does, also where it comes with a JWT.

    Raises:
        Unauthorized, ClientError, OverloadedError: neither key nor token is accepted, or the issuer is away.
    """
    offered = bearer(headers) or headers.get("x-api-key")
    if gate.tokens is None or offered is None or offered.count(".") != 2 or gate.keys.name(offered) is not None:
        return identified(gate, headers, remote)
    return await gate.tokens(offered)


def identified(gate: RequestGate, headers: Mapping[str, str], remote: str | None) -> str:
    """Return the caller's name: that of the key, or the address where no keys are set.

    Raises:
        Unauthorized: keys are set and the request has none of them.
    """
    if not gate.keys.needed:
        return remote or "local"
    name = gate.keys.name(bearer(headers) or headers.get("x-api-key"))
    if name is None:
        missing = "authorization" not in headers and "x-api-key" not in headers
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
