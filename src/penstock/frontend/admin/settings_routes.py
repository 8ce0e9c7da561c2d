"""Settings routes: show and change the live knobs of a running cluster, checked, for all its processes."""

from typing import Annotated

import msgspec
from aiohttp import web

from penstock.adapters.seams import StoreUnavailable
from penstock.config.live_knobs import changed, live_knobs, live_values, value_at
from penstock.config.reading.problems import ConfigProblems
from penstock.frontend.admin.admin_answers import (
    KnobChange,
    KnobSinceStart,
    KnobText,
    KnobValue,
    LiveSettings,
    ProcessSettings,
    SettingsSet,
)
from penstock.frontend.admin.admin_query import of_this_process
from penstock.frontend.admin.fleet_routes import body_of, store_of, unavailable
from penstock.frontend.admin.frontend_peers import from_peers
from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import Service, service_of
from penstock.runtime.cluster_state.current_settings import desire_settings
from penstock.runtime.records.change_log import change_of


class SetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/set: knob -> value, as text with units or as plain data."""

    values: Annotated[dict[str, KnobText], msgspec.Meta(extra_json_schema={"minProperties": 1})]


async def settings(request: web.Request) -> web.Response:
    """GET /admin/settings: every live knob's value, which were changed, and each frontend process's own values."""
    service = service_of(request)
    now, start = live_values(service.settings), live_values(service.cluster.started)
    changes = {key: KnobSinceStart(start[key], value) for key, value in now.items() if value != start[key]}
    frontends = [ProcessSettings(service.cluster.name, now)]
    if not of_this_process(request):
        for other in await from_peers(service, "/admin/settings?scope=process", LiveSettings):
            frontends += other.frontends
    return json_response(LiveSettings(now, changes, frontends))


async def set_values(request: web.Request) -> web.Response:
    """POST /admin/set: change live knobs in all frontends and the supervisor; all of them, or none."""
    service, store = service_of(request), store_of(request)
    body = await body_of(request, SetBody)
    if not body.values:
        raise rejected('values names no knob; send {"values": {"router.cost.overlap_credit": "2"}}', "values")
    overrides = [f"{key}={_knob_text(value)}" for key, value in body.values.items()]
    try:
        changes = changed(service.settings, overrides, service.cluster.started)
    except ConfigProblems as error:
        lines = "; ".join(str(problem) for problem in error.problems)
        raise rejected(f"nothing was changed: {lines}", "values", code="invalid_setting") from None
    by = request[CALLER]
    try:
        await desire_settings(store, changes, by)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    for change in changes:
        service.changes.write(change_of(change.key, change.old, change.new, by))
    done = {change.key: KnobChange(change.old, change.new) for change in changes}
    values = {key: done[key].new if key in done else _now(service, key) for key in {**body.values, **done}}
    return json_response(SettingsSet(done, values))


def _knob_text(value: KnobText) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _now(service: Service, key: str) -> KnobValue:
    knob = live_knobs(service.settings).get(key)
    return None if knob is None else msgspec.to_builtins(value_at(service.settings, knob.path))
