"""Planner routes: counters of all frontends for planners, and the planner's decisions with their reasons."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from penstock.adapters.sources.frontend_counters import ClusterCounters, FrontendCounters
from penstock.frontend.admin.admin_query import limits_of, of_this_process
from penstock.frontend.admin.frontend_peers import by_peer
from penstock.frontend.http.request_context import service_of
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import Service
from penstock.runtime.planning.planner_report import past_decisions


async def planner_counters(request: web.Request) -> web.Response:
    """GET /admin/planner/seen: the counters of every frontend process, and the engines as each one knows them.

    Reading changes nothing: a reader takes the difference to its reading before, so there may be many readers.
    """
    service = service_of(request)
    mine = service.cluster.export_counters(service.counts)
    if of_this_process(request):
        return json_response(mine)
    frontends, missing = [mine], []
    for url, text in (await by_peer(service, "/admin/planner/seen?scope=process")).items():
        try:
            frontends.append(msgspec.json.decode(text or b"", type=FrontendCounters))
        except msgspec.DecodeError:
            missing.append(url)
    return json_response(ClusterCounters(frontends=tuple(frontends), missing=tuple(missing)))


async def decisions(request: web.Request) -> web.Response:
    """GET /admin/planner/decisions?limit=N&ticks=all: the newest first, with the last tick and the planner's state.

    Without ``ticks=all`` ticks without a change are left out.
    """
    service = service_of(request)
    limits, every = limits_of(request), request.query.get("ticks") == "all"
    past = await asyncio.to_thread(past_decisions, Path(service.run), limits.limit, every=every) if service.run else {}
    return json_response({"planner": planner_of(service), "last": None, "decisions": [], **past})


def planner_of(service: Service) -> dict[str, Any] | None:
    """Return the planner's state by its last report; None where none runs."""
    report: dict[str, Any] | None = service.cluster.status().get("planner")
    return report
