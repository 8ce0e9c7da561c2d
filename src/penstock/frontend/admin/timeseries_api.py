"""Time series routes behind the page's charts: windows of requests and worker loads, over all frontend processes."""

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from penstock.frontend.admin.admin_query import of_this_process, seconds_of
from penstock.frontend.admin.frontend_peers import from_peers
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import Service, service_of
from penstock.kernel.time_windows import TimeWindow, WorkerColumns, columns_of, pools_of
from penstock.runtime.records.timeline_view import LoadsView, TimelineView, events_of

SLICE = 48
"""Windows between which other tasks get a turn: about 2 ms of work."""


class TimeseriesPart(msgspec.Struct, frozen=True):
    """One process's windows for another, and the time since it has counted (seconds of the run)."""

    name: str
    since: float
    windows: dict[int, TimeWindow]


async def timeline(request: web.Request) -> web.Response:
    """GET /admin/timeline?from=SECONDS: the windows since then, those of all frontend processes added up."""
    service = service_of(request)
    store = service.timeline_store
    start = seconds_of(request, "from") or 0.0
    mine = _timeseries_part(service, start)
    if of_this_process(request):
        return json_response(
            TimeseriesPart(mine.name, mine.since, {n: window.without_loads() for n, window in mine.windows.items()})
        )
    others = await from_peers(service, f"/admin/timeline?scope=process&from={start:.3f}", TimeseriesPart)
    merged = await _windows_added(mine, others)
    last = int(store.now // store.timeline.width)
    first = min(merged, default=last)
    windows = [merged.get(number) for number in range(first, last + 1)]
    columns: dict[str, list[Any]] = {}
    for at in range(0, len(windows), SLICE):
        for name, column in columns_of(windows[at : at + SLICE]).items():
            columns.setdefault(name, []).extend(column)
        await asyncio.sleep(0)
    return json_response(
        TimelineView(
            kind="live",
            name=service.settings.name,
            run=service.run,
            zero=time.time() - store.now,
            now=store.now,
            width=store.timeline.width,
            windows_max=store.timeline.windows_max,
            first=first,
            columns=columns,
            pools=pools_of(windows),
            frontends={part.name: part.since for part in (mine, *others)},
            events=await asyncio.to_thread(events_of, Path(service.run)) if service.run else [],
        )
    )


async def workers(request: web.Request) -> web.Response:
    """GET /admin/timeline/workers?at=SECONDS: how loaded each worker was in the window of a moment."""
    service = service_of(request)
    timeline = service.timeline_store.timeline
    at = seconds_of(request, "at")
    at = service.timeline_store.now if at is None else at
    loads = timeline.loads_at(at)
    if loads is None and not of_this_process(request):
        others = await from_peers(service, f"/admin/timeline/workers?scope=process&at={at:.3f}", LoadsView)
        loads = next((other.workers for other in others if other.workers is not None), None)
    return json_response(LoadsView(at // timeline.width * timeline.width, loads))


async def worker(request: web.Request) -> web.Response:
    """GET /admin/timeline/workers/{worker}: one worker's load over all windows that are kept."""
    service = service_of(request)
    name = request.match_info["worker"]
    columns = service.timeline_store.timeline.worker_columns(name)
    if columns is None and not of_this_process(request):
        others = await from_peers(
            service, f"/admin/timeline/workers/{quote(name, safe='')}?scope=process", WorkerColumns
        )
        columns = others[0] if others else None
    if columns is None:
        raise rejected(
            f"no worker {quoted(name)} was seen; GET /admin/status lists those that are there",
            code="unknown_worker",
            status=404,
        )
    return json_response(columns)


def _timeseries_part(service: Service, start: float) -> TimeseriesPart:
    store = service.timeline_store
    since = int(start // store.timeline.width)
    windows = {number: window for number, window in store.timeline.windows.items() if number >= since}
    return TimeseriesPart(service.cluster.name, store.since, windows)


async def _windows_added(mine: TimeseriesPart, others: list[TimeseriesPart]) -> dict[int, TimeWindow]:
    if not others:
        return mine.windows
    total: dict[int, TimeWindow] = {}
    for part in (mine, *others):
        for count, (number, window) in enumerate(part.windows.items()):
            known = total.get(number)
            if known is None:
                # Adding changes it, and this process's own windows must not change.
                known = total[number] = TimeWindow()
                known.running = known.queued = 0
            known.add(window)
            if count % SLICE == 0:
                await asyncio.sleep(0)
    return total
