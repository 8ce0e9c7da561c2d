"""Recorded run server: serves a finished run's page and data on loopback, without a cluster."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from aiohttp import web

from penstock.frontend.admin import page_routes
from penstock.frontend.admin.admin_answers import DecisionList, RequestList
from penstock.frontend.admin.admin_query import limits_of, seconds_of
from penstock.frontend.http.api_keys import ApiKeys, check_admin
from penstock.frontend.http.error_responses import problem, problem_of, quoted, rejected, response_of
from penstock.frontend.openai.models import json_response
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.machine import SECOND
from penstock.kernel.request_record import Explanation, RequestEnd
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.planner_report import PlannerDecisions
from penstock.runtime.records.timeline_view import LoadsView, RecordedColumns, TimelineView


class RecordedRunServer(Protocol):
    """A finished run: `penstock_lab.report.run.recording.Recording`. Times are seconds since its start."""

    def whole_run(self) -> TimelineView:
        """Return the whole run, window by window."""
        ...

    def workers(self, at: float | None) -> LoadsView:
        """Return how loaded each worker was at a moment, or at the end."""
        ...

    def worker(self, name: str) -> RecordedColumns | None:
        """Return one worker's load over the run, or None where there was no such worker."""
        ...

    def decisions(self, limit: int, before: float | None, worker: str | None) -> list[msgspec.Raw]:
        """Return the newest decisions first."""
        ...

    def requests(self, limit: int, before: float | None) -> list[RequestEnd]:
        """Return the newest ends first."""
        ...

    def planner(self, limit: int) -> list[TickRecord]:
        """Return its planner's ticks, the newest first; empty where it had no planner."""
        ...

    def explain(self, request: str) -> Explanation[msgspec.Raw]:
        """Return a request's end and its decisions; ConfigError where there is none."""
        ...


def recorded_app(run: RecordedRunServer) -> web.Application:
    """Make the application: the page's routes, each as a live frontend serves it."""

    async def timeline(request: web.Request) -> web.Response:
        return json_response(await asyncio.to_thread(run.whole_run))

    async def workers(request: web.Request) -> web.Response:
        return json_response(run.workers(seconds_of(request, "at")))

    async def worker(request: web.Request) -> web.Response:
        name = request.match_info["worker"]
        columns = run.worker(name)
        if columns is None:
            raise rejected(f"this run tells nothing of a worker {quoted(name)}", code="unknown_worker", status=404)
        return json_response(columns)

    async def decisions(request: web.Request) -> web.Response:
        limits = limits_of(request)
        before = None if limits.before is None else limits.before / SECOND
        return json_response(DecisionList(run.decisions(limits.limit, before, limits.worker)))

    async def requests(request: web.Request) -> web.Response:
        limits = limits_of(request)
        before = None if limits.before is None else limits.before / SECOND
        return json_response(RequestList(run.requests(limits.limit, before)))

    async def planner(request: web.Request) -> web.Response:
        decisions = await asyncio.to_thread(run.planner, limits_of(request).limit)
        return json_response(PlannerDecisions(None, None, decisions))

    async def explain(request: web.Request) -> web.Response:
        try:
            return json_response(await asyncio.to_thread(run.explain, request.match_info["request"]))
        except ConfigError as error:
            raise rejected(error.message, code="unknown_request", status=404) from error

    app = web.Application(middlewares=[_guarded])
    app.add_routes(
        [
            web.get("/", page_routes.home),
            web.get("/ui", page_routes.page),
            web.get("/ui/{file}", page_routes.file),
            web.get("/admin/timeline", timeline),
            web.get("/admin/timeline/workers", workers),
            web.get("/admin/timeline/workers/{worker}", worker),
            web.get("/admin/decisions", decisions),
            web.get("/admin/requests", requests),
            web.get("/admin/planner/decisions", planner),
            web.get("/admin/explain/{request}", explain),
        ]
    )
    return app


async def serve(run: RecordedRunServer, sockets: list[socket.socket], stop: asyncio.Event) -> None:
    """Serve a run over bound sockets until ``stop`` is set."""
    runner = web.AppRunner(recorded_app(run), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        for bound in sockets:
            await web.SockSite(runner, bound).start()
        with contextlib.suppress(asyncio.CancelledError):
            await stop.wait()
    finally:
        await runner.cleanup()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Accept only callers of this machine that name it, so no other site's page can read the run; answer errors."""
    try:
        host = request.headers.get("host", "localhost")
        check_admin(ApiKeys(()), request.headers, remote=request.remote, host=host, method=request.method)
        return await handler(request)
    except PenstockError as error:
        return response_of(problem_of(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return response_of(problem(error.status, f"{request.method} {request.path}: {error.reason}", code="not_found"))
