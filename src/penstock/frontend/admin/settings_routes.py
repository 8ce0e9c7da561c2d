"""Settings routes: show and change the live knobs of a running cluster, checked, for all its processes."""

from typing import Any

import msgspec
from aiohttp import web

from penstock.adapters.seams import StoreUnavailable
from penstock.config.live_knobs import changed, live_knobs, live_values, value_at
from penstock.config.reading.problems import ConfigProblems
from penstock.frontend.admin.fleet_routes import body_of, store_of, unavailable
from penstock.frontend.admin.frontend_peers import from_peers
from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import Service, service_of
from penstock.runtime.cluster_state.current_settings import desire_settings
from penstock.runtime.records.settings_changes import line_of


class SetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/set: knob -> value, as text with units or as plain data."""

    values: dict[str, str | int | float | bool | None]


async def settings(request: web.Request) -> web.Response:
    """GET /admin/settings: every live knob's value, which were changed, and each frontend process's own values."""
    service = service_of(request)
    now = live_values(service.settings)
    mine = {"name": service.cluster.name, "settings": now}
    others: list[Any] = []
    if request.query.get("scope") != "process":
        others = await from_peers(service, "/admin/settings?scope=process")
    start = live_values(service.cluster.started)
    return json_response(
        {
            "settings": now,
            "changed": {key: {"start": start[key], "now": value} for key, value in now.items() if value != start[key]},
            "frontends": [mine, *(frontend for other in others for frontend in other["frontends"])],
        }
    )


async def set_values(request: web.Request) -> web.Response:
    """POST /admin/set: change live knobs in all frontends and the supervisor; all of them, or none."""
    service, store = service_of(request), store_of(request)
    body = await body_of(request, SetBody)
    if not body.values:
        raise rejected('values names no knob; send {"values": {"router.cost.overlap_credit": "2"}}', "values")
    overrides = [f"{key}={_text(value)}" for key, value in body.values.items()]
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
        service.changes.write(line_of(change.key, change.old, change.new, by))
    return json_response(
        {
            "changed": {change.key: {"old": change.old, "new": change.new} for change in changes},
            "values": {key: _now(service, key) for key in body.values if key not in {c.key for c in changes}}
            | {change.key: change.new for change in changes},
        }
    )


def _text(value: str | float | bool | None) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _now(service: Service, key: str) -> Any:
    knob = live_knobs().get(key)
    return None if knob is None else msgspec.to_builtins(value_at(service.settings, knob.path))
