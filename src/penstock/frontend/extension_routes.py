"""Routes of extensions: what each adds to a frontend at the seam ``route``, with a guard around every handler.

An entry is called with the `Service` and a function that returns the handlers of all requests to engines.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from aiohttp import web

from penstock import extension
from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.middleware import Handler, for_admins, with_key
from penstock.frontend.http.request_context import expect_continue
from penstock.frontend.http.request_gate import Handler as Routed
from penstock.frontend.service import Service
from penstock.kernel.errors import PenstockError

log = logging.getLogger("penstock.frontend")

Guard = Callable[[Handler], Handler]
GUARDS: Mapping[str, Guard] = {"key": with_key, "admin": for_admins, "open": lambda handler: handler}
FAILURES_MAX = 10
"""Failures in a row after which a route is left out: one may be of a request that nobody else sends."""
BLOCKED = 0.1
"""Seconds for which a handler may hold the event loop, in which every stream of the process waits."""


class FrontendRoute(NamedTuple):
    """One route.

    Args:
        path: as aiohttp has it; one that the server has already is never asked.
        access: ``key`` asks for a client's key where keys are set, ``admin`` for an administrator's, ``open`` for none.
        timeout: seconds in which it must answer; None is as long as it takes.
        form: takes a large body, which a client may announce with ``expect: 100-continue``.
    """

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    access: Literal["key", "admin", "open"] = "key"
    timeout: float | None = 30.0
    form: bool = False


@dataclass(frozen=True, slots=True)
class FrontendRoutes:
    """What an extension adds to a frontend.

    Args:
        routes: answered by handlers of aiohttp.
        posts: path -> what carries a POST that goes to engines, counted and limited as a chat is.
        setup: puts what the handlers share into the application of a frontend that serves.
        run: runs beside it, until it is cancelled.
    """

    routes: Sequence[FrontendRoute] = ()
    posts: Mapping[str, Routed] = field(default_factory=dict)
    setup: Callable[[web.Application], None] | None = None
    run: Callable[[], Coroutine[Any, Any, None]] | None = None


def extension_routes(service: Service, handlers: Callable[[], Mapping[str, Routed]]) -> list[FrontendRoutes]:
    """Return what the installed extensions add; one that can't is left out, with a finding.

    Args:
        handlers: returns the handlers of all requests to engines, those of extensions included.
    """
    made = []
    for name in extension.names("route"):
        try:
            part: FrontendRoutes = extension.entry("route", name)(service, handlers)
            routes = [each._replace(handler=guarded(name, each, service.left_out)) for each in part.routes]
        except Exception as error:  # noqa: BLE001 - an extension's own code: the frontend serves without it
            _leave_out(service.left_out, f"routes of {name}", f"{type(error).__name__}: {error}")
            continue
        made.append(FrontendRoutes(routes, part.posts, part.setup, part.run))
    return made


def add_routes(app: web.Application, parts: Sequence[FrontendRoutes]) -> None:
    """Add the routes of extensions to an application."""
    for part in parts:
        for route in part.routes:
            handler = GUARDS[route.access](route.handler)
            expects = expect_continue if route.form else None
            app.router.add_route(route.method, route.path, handler, expect_handler=expects)


def guarded(name: str, route: FrontendRoute, left_out: dict[str, str]) -> Handler:
    """Return a route's handler that is left out once it failed, or held the event loop, too often in a row.

    Args:
        left_out: takes the reason by then.
    """
    title, failures = f"the route {route.method} {route.path} of {name}", 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal failures
        if title in left_out:
            raise rejected(f"{title} is left out: {left_out[title]}", code="left_out", status=503)
        steps = _Steps(route.handler(request))
        fault: str | None = None
        try:
            async with asyncio.timeout(route.timeout):
                return await steps
        except (PenstockError, web.HTTPException, ConnectionError):
            raise
        except TimeoutError:
            fault = f"it did not answer within {route.timeout} s"
            raise rejected(f"{title}: {fault}", code="timeout", status=504) from None
        except Exception as error:
            fault = f"it raised {type(error).__name__}: {error}"
            log.exception("%s failed", title)
            raise rejected(f"{title} failed", code="extension_failed", status=500) from None
        finally:
            if fault is None and steps.longest > BLOCKED:
                fault = f"it held the event loop for {steps.longest:.2f} s"
            failures = 0 if fault is None else failures + 1
            if fault is not None and failures >= FAILURES_MAX:
                _leave_out(left_out, title, f"{fault}, {failures} failures in a row")

    return handler


class _Steps:
    """Awaits a coroutine, and knows the longest time in seconds for which it held the event loop."""

    def __init__(self, awaitable: Awaitable[web.StreamResponse]) -> None:
        self._awaitable = awaitable
        self.longest = 0.0

    def __await__(self) -> Generator[Any, Any, web.StreamResponse]:
        steps = self._awaitable.__await__()
        resume: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            began = time.perf_counter()
            try:
                waits_for = resume()
            except StopIteration as end:
                answer: web.StreamResponse = end.value
                return answer
            finally:
                self.longest = max(self.longest, time.perf_counter() - began)
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - a cancellation and the like are the coroutine's to handle
                thrown = error
                resume = lambda: steps.throw(thrown)  # type: ignore[attr-defined]  # noqa: B023, E731
            else:
                resume = lambda: next(steps)  # noqa: E731


def _leave_out(left_out: dict[str, str], what: str, why: str) -> None:
    left_out[what] = why
    log.error("%s is left out from now on: %s", what, why)
