"""What do planners, and those who watch them, ask of a frontend? What it counted; what was decided and why."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from penstock.adapters.sources.told import ClusterTold, FrontendTold
from penstock.frontend.asked import limits_of, of_this_process
from penstock.frontend.context import service_of
from penstock.frontend.models import json_response
from penstock.frontend.peering import by_peer
from penstock.frontend.service import Service
from penstock.runtime.planning.report import past_decisions


async def seen(request: web.Request) -> web.Response:
    """GET /admin/planner/seen: the counters of every frontend process, and the engines as each one sees them.

    Reading changes nothing: whoever reads takes the difference to the reading before, so there may be many readers.
    """
    service = service_of(request)
    mine = service.cluster.told(service.counts)
    if of_this_process(request):
        return json_response(mine)
    told, missing = [mine], []
    for url, text in (await by_peer(service, "/admin/planner/seen?scope=process")).items():
        try:
            told.append(msgspec.json.decode(text or b"", type=FrontendTold))
        except msgspec.DecodeError:
            missing.append(url)
    return json_response(ClusterTold(frontends=tuple(told), missing=tuple(missing)))


async def decisions(request: web.Request) -> web.Response:
    """GET /admin/planner/decisions?limit=N&ticks=all: the newest first, with the last tick and how the planner is.

    Without ``ticks=all`` those are left out in which nothing was to change.
    """
    service = service_of(request)
    asked, every = limits_of(request), request.query.get("ticks") == "all"
    found = await asyncio.to_thread(past_decisions, Path(service.run), asked.limit, every=every) if service.run else {}
    return json_response({"planner": planner_of(service), "last": None, "decisions": [], **found})


def planner_of(service: Service) -> dict[str, Any] | None:
    """Return how the planner is, as it last said; None where none runs."""
    found: dict[str, Any] | None = service.cluster.status().get("planner")
    return found
