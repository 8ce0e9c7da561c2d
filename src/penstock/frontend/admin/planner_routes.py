"""Planner routes: counters of all frontends for planners, and the planner's decisions with their reasons."""

import asyncio
from pathlib import Path

import msgspec
from aiohttp import web

from penstock.adapters.sources.frontend_counters import ClusterCounters, FrontendCounters
from penstock.frontend.admin.admin_query import limits_of, of_this_process
from penstock.frontend.admin.frontend_peers import by_peer
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import service_of
from penstock.runtime.planning.planner_report import PlannerDecisions, past_decisions


async def planner_counters(request: web.Request) -> web.Response:
    """GET /admin/planner/seen: the counters of every frontend process, and the engines as each one knows them.

    Reading changes nothing: a reader takes the difference to its reading before, so there may be many readers.
    """
    service = service_of(request)
    mine = service.cluster.export_counters(service.counts)
    if of_this_process(request):
        return json_response(mine)
    frontends, missing = [mine], []
    for url, counters in (await by_peer(service, "/admin/planner/seen?scope=process", FrontendCounters)).items():
        if counters is None:
            missing.append(url)
        else:
            frontends.append(counters)
    return json_response(ClusterCounters(frontends=tuple(frontends), missing=tuple(missing)))


async def decisions(request: web.Request) -> web.Response:
    """GET /admin/planner/decisions?limit=N&ticks=all: the newest first, with the last tick and the planner's state.

    Without ``ticks=all`` ticks without a change are left out.
    """
    service = service_of(request)
    limits, every = limits_of(request), request.query.get("ticks") == "all"
    past = PlannerDecisions[msgspec.Raw](None, None, [])
    if service.run:
        past = await asyncio.to_thread(past_decisions, Path(service.run), limits.limit, every=every)
    return json_response(msgspec.structs.replace(past, planner=service.cluster.status().planner))
