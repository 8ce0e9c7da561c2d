"""Admin API: the table of the admin routes, from which they are served and described."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.adapters.sources.frontend_counters import ClusterCounters, FrontendCounters
from penstock.frontend.admin import (
    adapter_routes,
    admin_routes,
    fleet_routes,
    planner_routes,
    settings_routes,
    timeseries_api,
)
from penstock.frontend.admin.admin_answers import (
    ClusterStatus,
    DecisionList,
    LiveSettings,
    ProcessStatus,
    RequestList,
    SettingsSet,
    WorkerIndex,
)
from penstock.frontend.admin.admin_query import LIMIT_MAX, SECONDS_MAX
from penstock.frontend.http.middleware import Handler
from penstock.kernel.request_record import Explanation
from penstock.kernel.time_windows import WorkerColumns
from penstock.planner.tick_record import TickRecord
from penstock.router.events import Decision
from penstock.runtime.cluster_state.fleet_api import (
    AdapterList,
    AdapterState,
    AdapterUnloaded,
    AdapterWorkersBody,
    CachesCleared,
    DesiredState,
    DrainBegun,
    DrainBody,
    DrainUndone,
    FlipBody,
    Flipped,
    LoadAdapterBody,
    PoolsScaled,
    RestartBegun,
    RestartBody,
    ScaleBody,
    UnloadAdapterBody,
)
from penstock.runtime.planning.planner_report import PlannerDecisions
from penstock.runtime.records.timeline_view import LoadsView, TimelineView
from penstock.runtime.records.usage_table import UsageTable


class QueryParameter(NamedTuple):
    """A parameter of a route's query. ``kind``: the type of its value."""

    name: str
    kind: Any
    text: str


class AdminRoute(NamedTuple):
    """One route for administrators.

    Args:
        answers: types of the JSON answer; a second one is that with ``scope=process``, or with ``undo``.
        errors: statuses of errors beside 401 and 403.
        partly: status of the same answer where it was done only in part.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    name: str
    summary: str
    answers: tuple[Any, ...]
    errors: tuple[int, ...] = ()
    query: tuple[QueryParameter, ...] = ()
    body: type[msgspec.Struct] | None = None
    partly: int | None = None


def _moment(name: str) -> QueryParameter:
    kind = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
    return QueryParameter(name, kind, "Seconds since the start of the run.")


_PROCESS = QueryParameter("scope", str, "process: this process alone.")
_LIMIT = QueryParameter("limit", Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)], "Most records; 50 where unset.")
_SINCE = QueryParameter("since", Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)], "Only this many seconds back.")
_OF_WORKER = QueryParameter("worker", str, "Only those for this worker.")
_TICKS = QueryParameter("ticks", str, "all: also those in which nothing was to change.")
_MODEL = QueryParameter("model", str, "Only its engines.")
_CHANGE = (400, 408, 413, 503)
"""Errors of a route that writes into the store."""

ADMIN_ROUTES = (
    AdminRoute(
        "GET",
        "/admin/status",
        admin_routes.status,
        "status",
        "Models, workers, queues, counts, findings.",
        answers=(ClusterStatus, ProcessStatus),
        query=(_PROCESS,),
    ),
    AdminRoute(
        "GET",
        "/admin/explain/{request}",
        admin_routes.explain,
        "explain",
        "A request's end and its decisions with all candidates.",
        answers=(Explanation[Decision],),
        errors=(404,),
        query=(_PROCESS,),
    ),
    AdminRoute(
        "GET",
        "/admin/requests",
        admin_routes.requests,
        "requests",
        "The newest ended requests.",
        answers=(RequestList,),
        errors=(400,),
        query=(_LIMIT, _moment("before"), _PROCESS),
    ),
    AdminRoute(
        "GET",
        "/admin/decisions",
        admin_routes.decisions,
        "decisions",
        "The newest decisions.",
        answers=(DecisionList[Decision],),
        errors=(400,),
        query=(_LIMIT, _moment("before"), _OF_WORKER, _PROCESS),
    ),
    AdminRoute(
        "GET",
        "/admin/usage",
        admin_routes.usage,
        "usage",
        "Tokens and requests of each tenant and key.",
        answers=(UsageTable,),
        errors=(400,),
        query=(_SINCE,),
    ),
    AdminRoute(
        "GET",
        "/admin/timeline",
        timeseries_api.timeline,
        "timeline",
        "Windows of 5 s of the last hour; null is unknown.",
        answers=(TimelineView, timeseries_api.TimeseriesPart),
        errors=(400,),
        query=(_moment("from"), _PROCESS),
    ),
    AdminRoute(
        "GET",
        "/admin/timeline/workers",
        timeseries_api.workers,
        "loads",
        "How loaded each worker was.",
        answers=(LoadsView,),
        errors=(400,),
        query=(_moment("at"), _PROCESS),
    ),
    AdminRoute(
        "GET",
        "/admin/timeline/workers/{worker}",
        timeseries_api.worker,
        "load",
        "One worker's load over time.",
        answers=(WorkerColumns,),
        errors=(404,),
        query=(_PROCESS,),
    ),
    AdminRoute(
        "GET",
        "/admin/index/{worker}",
        admin_routes.worker_index,
        "index",
        "Which blocks routers believe in a worker's host memory and below.",
        answers=(WorkerIndex,),
        errors=(404,),
        query=(_PROCESS,),
    ),
    AdminRoute(
        "GET",
        "/admin/planner/seen",
        planner_routes.planner_counters,
        "planner_seen",
        summary="What planners read: counters that only grow, of every frontend.",
        answers=(ClusterCounters, FrontendCounters),
        query=(_PROCESS,),
    ),
    AdminRoute(
        "GET",
        "/admin/planner/decisions",
        planner_routes.decisions,
        "planner_decisions",
        summary="The planner's decisions, and how it is.",
        answers=(PlannerDecisions[TickRecord],),
        errors=(400,),
        query=(_LIMIT, _TICKS),
    ),
    AdminRoute(
        "GET",
        "/admin/desired",
        fleet_routes.desired,
        "desired",
        "Desired state of each pool and its progress.",
        answers=(DesiredState,),
        errors=(503,),
    ),
    AdminRoute(
        "POST",
        "/admin/scale",
        fleet_routes.scale,
        "scale",
        "Set the desired numbers of replicas.",
        answers=(PoolsScaled,),
        errors=(*_CHANGE, 404),
        body=ScaleBody,
    ),
    AdminRoute(
        "POST",
        "/admin/drain",
        fleet_routes.drain,
        "drain",
        summary="Take a worker or a frontend out of service, or let it in again.",
        answers=(DrainBegun, DrainUndone),
        errors=(*_CHANGE, 404, 409),
        body=DrainBody,
    ),
    AdminRoute(
        "POST",
        "/admin/flip",
        fleet_routes.flip,
        "flip",
        summary="Give a worker another role once it has finished what it has; without a role its pool's.",
        answers=(Flipped,),
        errors=(*_CHANGE, 404, 409),
        body=FlipBody,
    ),
    AdminRoute(
        "POST",
        "/admin/restart",
        fleet_routes.restart,
        "restart",
        summary="Replace every engine and every frontend, one after the other.",
        answers=(RestartBegun,),
        errors=_CHANGE,
        body=RestartBody,
    ),
    AdminRoute(
        "GET",
        "/admin/settings",
        settings_routes.settings,
        "settings",
        "Every live knob, and what was changed.",
        answers=(LiveSettings,),
        errors=(503,),
        query=(_PROCESS,),
    ),
    AdminRoute(
        "POST",
        "/admin/set",
        settings_routes.set_values,
        "set",
        "Change live knobs, all that are named or none.",
        answers=(SettingsSet,),
        errors=_CHANGE,
        body=settings_routes.SetBody,
    ),
    AdminRoute(
        "GET",
        "/admin/adapters",
        adapter_routes.adapters,
        "adapters",
        "LoRA adapters, and the workers that hold them.",
        answers=(AdapterList,),
    ),
    AdminRoute(
        "POST",
        "/admin/adapters",
        adapter_routes.scale_adapter,
        "scaleAdapter",
        summary="Have a LoRA adapter on so many workers at any time.",
        answers=(AdapterState,),
        errors=(*_CHANGE, 404, 409),
        body=AdapterWorkersBody,
    ),
    AdminRoute(
        "POST",
        "/v1/load_lora_adapter",
        adapter_routes.load_adapter,
        "loadAdapter",
        summary="Let clients name a LoRA adapter, and load it on one worker at least.",
        answers=(AdapterState,),
        errors=(*_CHANGE, 404, 409, 502),
        body=LoadAdapterBody,
    ),
    AdminRoute(
        "POST",
        "/v1/unload_lora_adapter",
        adapter_routes.unload_adapter,
        "unloadAdapter",
        summary="Take a LoRA adapter out of service, and out of every engine's memory.",
        answers=(AdapterUnloaded,),
        errors=(*_CHANGE, 404, 409),
        body=UnloadAdapterBody,
    ),
    AdminRoute(
        "POST",
        "/clear_kv_blocks",
        admin_routes.clear_kv_blocks,
        "clearKvBlocks",
        summary="Make every engine (of a model) reset its prefix cache; 502 where one did not.",
        answers=(CachesCleared,),
        errors=(400, 404, 408, 413),
        query=(_MODEL,),
        partly=502,
    ),
)
