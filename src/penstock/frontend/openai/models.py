"""Model and health routes: the models, whether this endpoint can serve, and parts of lists as OpenAI's have them."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from penstock.adapters.engines.pool_overrides import REASONING_PARSER, TOOL_PARSER
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.service import Service, service_of
from penstock.runtime.cluster_state.adapter_registry import KnownAdapter

Capability = Literal["chat", "completions", "embeddings", "tools", "reasoning", "vision", "adapters"]


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as OpenAI lists it.

    ``root``: the model behind a name; of a name that models share, the one with the largest weight. ``parent``: of a
    LoRA adapter, its base model. ``capabilities``: those that are known; another may be there as well.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    capabilities: list[Capability] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


class ModelReady(msgspec.Struct, frozen=True):
    """Whether a model can be served now, and by how many workers."""

    id: str
    ready: bool
    workers: int


class Health(msgspec.Struct, frozen=True):
    """Whether this endpoint can serve. ``models``: ready workers; ``degraded``: some model has none."""

    status: Literal["ok", "degraded", "unready", "draining"]
    models: dict[str, int]
    notes: list[str]


class Live(msgspec.Struct, frozen=True):
    """A process that answers."""

    status: Literal["ok"] = "ok"


OWNER = "penstock"


def json_response(data: Any, status: int = 200) -> web.Response:
    """Return data as compact JSON."""
    return web.Response(status=status, body=msgspec.json.encode(data), content_type="application/json")


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    service = service_of(request)
    models = [_model_entry(service, name) for name in service.catalog.usable(request[CALLER])]
    return json_response(ModelList(data=models + await _adapter_entries(request, service)))


async def one_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id} and /v1/models/{id}/ready; an id may have slashes."""
    service = service_of(request)
    name = request.match_info["model"]
    known = service.catalog.usable(request[CALLER])
    if name in known:
        return json_response(_model_entry(service, name))
    loads = service.cluster.adapters
    adapter = None if loads is None else loads.registry.find(name)
    if adapter is not None and service.may_use(request[CALLER], name):
        return json_response(_adapter_entry(adapter))
    model = name.removesuffix("/ready")
    if model != name and model in known:
        workers = service.cluster.ready(service.catalog.resolve(model).model)
        return json_response(ModelReady(model, workers > 0, workers), 200 if workers else 503)
    raise service.catalog.unknown(name, request[CALLER])


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


def _model_entry(service: Service, name: str) -> ModelEntry:
    catalog = service.catalog
    card = catalog.models().get(name)
    root = catalog.names.main(name)
    adapter = card is not None and card.model != root
    return ModelEntry(
        id=name,
        created=service.created,
        owned_by=OWNER,
        root=card.model if card is not None and adapter else root,
        parent=card.model if card is not None and adapter else None,
        max_model_len=msgspec.UNSET if card is None or card.max_model_len is None else card.max_model_len,
        capabilities=_capabilities(service, root if card is None else card.model),
    )


def _capabilities(service: Service, model: str) -> list[Capability]:
    """Return what is known of a model's engines, from their cards, their pools' settings and the tokenizer."""
    cards = [card for card in service.cluster.cards() if card.model == model]
    if not cards:
        return []
    configured = service.settings.models.get(model)
    pools = () if configured is None else configured.pools.values()
    labels = [card.labels for card in cards]
    images = service.cluster.images(model)
    tokenizer = service.catalog.tokenizers.get(model)
    known: dict[Capability, bool] = {
        "chat": tokenizer is None or tokenizer.template is not None,
        "completions": True,
        "embeddings": any(card.engine == "sim" for card in cards),
        "tools": any(pool.tool_parser for pool in pools) or any(TOOL_PARSER in each for each in labels),
        "reasoning": any(pool.reasoning_parser for pool in pools) or any(REASONING_PARSER in each for each in labels),
        "vision": images is not None and bool(images.placeholders),
        "adapters": any(card.adapters for card in cards),
    }
    return [name for name, has in known.items() if has]


async def _adapter_entries(request: web.Request, service: Service) -> list[ModelEntry]:
    """Return the LoRA adapters that the caller may use and no worker listed as it came."""
    loads = service.cluster.adapters
    if loads is None:
        return []
    models = service.catalog.models()
    known = await asyncio.to_thread(list, loads.registry.listed())
    return [
        _adapter_entry(adapter)
        for adapter in known
        if adapter.name not in models and service.may_use(request[CALLER], adapter.name)
    ]


def _adapter_entry(adapter: KnownAdapter) -> ModelEntry:
    return ModelEntry(id=adapter.name, owned_by=OWNER, root=adapter.path, parent=adapter.model)


T = TypeVar("T")


def page_of(request: web.Request, every: list[T], most: int, id_of: Callable[[T], str]) -> tuple[list[T], bool]:
    """Return the page, and whether there is more; ``most``: its largest size.

    Raises:
        ClientError: 400: one of the two is wrong.
    """
    limit = request.query.get("limit", "20" if most <= 100 else str(most))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= most:
        raise rejected(f"limit must be a number from 1 to {most}", "limit")
    after = request.query.get("after")
    if after is not None:
        at = next((number for number, entry in enumerate(every) if id_of(entry) == after), None)
        if at is None:
            raise rejected(f"after must name one of the list, not {quoted(after)}", "after")
        every = every[at + 1 :]
    return every[: int(limit)], len(every) > int(limit)
