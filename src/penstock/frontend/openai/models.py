"""Model and health routes: the models, and whether this endpoint can serve."""

from typing import Any

import msgspec
from aiohttp import web

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.openai.model_answers import Health, Live, ModelEntry, ModelList, ModelReady
from penstock.frontend.service import Service, service_of

OWNER = "penstock"


def json_response(data: Any, status: int = 200) -> web.Response:
    """Return data as compact JSON."""
    return web.Response(status=status, body=msgspec.json.encode(data), content_type="application/json")


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    service = service_of(request)
    return json_response(ModelList(data=[_entry(service, name) for name in sorted(service.catalog.models())]))


async def one_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id} and /v1/models/{id}/ready; an id may have slashes."""
    service = service_of(request)
    name = request.match_info["model"]
    known = service.catalog.models()
    if name in known:
        return json_response(_entry(service, name))
    model = name.removesuffix("/ready")
    if model != name and model in known:
        workers = service.cluster.ready(service.catalog.resolve(model).model)
        return json_response(ModelReady(model, workers > 0, workers), 200 if workers else 503)
    listed = ", ".join(sorted(known)) or "none yet"
    raise rejected(
        f"the model {quoted(name)} does not exist; known models: {listed}", "model", code="model_not_found", status=404
    )


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 where at least one model can be served; notes name what is wrong."""
    service = service_of(request)
    health = health_of(service)
    return json_response(health, 200 if health.status in ("ok", "degraded") else 503)


async def live(request: web.Request) -> web.Response:
    """GET /live: 200 for as long as this process answers."""
    return json_response(Live())


def health_of(service: Service) -> Health:
    """Return the health object: ok, degraded (some model has no worker), unready or draining."""
    names = {*service.settings.models, *(card.model for card in service.cluster.cards())}
    ready = {name: service.cluster.ready(name) for name in sorted(names)}
    if service.gate.draining:
        return Health("draining", ready, service.notes())
    if not any(ready.values()):
        return Health("unready", ready, service.notes())
    return Health("ok" if all(ready.values()) else "degraded", ready, service.notes())


def _entry(service: Service, name: str) -> ModelEntry:
    card = service.catalog.models().get(name)
    return ModelEntry(
        id=name,
        owned_by=OWNER,
        root=name if card is None else card.model,
        parent=None if card is None or card.model == name else card.model,
        max_model_len=msgspec.UNSET if card is None or card.max_model_len is None else card.max_model_len,
    )
