"""Adapter routes for administrators: load and unload LoRA adapters as vLLM's own routes do, and what workers hold."""

import asyncio
import re
from collections.abc import Iterator

from aiohttp import web

from penstock.adapters.seams import StoreUnavailable
from penstock.frontend.admin.admin_answers import WantedAdapter
from penstock.frontend.admin.fleet_routes import body_of, note, store_of, unavailable
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import Service, service_of
from penstock.kernel.values import WorkerId
from penstock.runtime.cluster_state.adapter_registry import NAME, KnownAdapter
from penstock.runtime.cluster_state.desired_state import (
    ADAPTER_WORKERS,
    ADAPTERS,
    AdapterSpec,
    AdapterWorkersSpec,
    put,
)
from penstock.runtime.cluster_state.fleet_api import (
    AdapterList,
    AdapterState,
    AdapterUnloaded,
    AdapterWorkersBody,
    LoadAdapterBody,
    UnloadAdapterBody,
)
from penstock.runtime.node.adapter_loads import AdapterLoads

_BAD_PATH = re.compile(r"[\x00-\x1f\x7f]")


async def load_adapter(request: web.Request) -> web.Response:
    """POST /v1/load_lora_adapter: let clients name an adapter, and load it on one worker at least."""
    store, body = store_of(request), await body_of(request, LoadAdapterBody)
    service = service_of(request)
    loads = _adapter_loads(service)
    name, path = body.lora_name, body.lora_path
    if not NAME.match(name):
        hint = "1 to 200 letters, digits and ._-@:+, the first a letter or a digit"
        raise rejected(f"{quoted(name)} is not a valid name for an adapter; take {hint}", "lora_name")
    if not path or _BAD_PATH.search(path):
        raise rejected("lora_path is empty, or has characters that no path has", "lora_path")
    model = body.model or _only_model(service, loads)
    if name in service.catalog.tokenizers or any(card.model == name for card in service.cluster.cards()):
        raise rejected(f"{quoted(name)} is the name of a model", "lora_name", code="name_taken")
    before = loads.registry.find(name)
    if before is not None and (before.path, before.model) != (path, model):
        raise rejected(
            f"adapter {quoted(name)} is that of {before.model} at {quoted(before.path)}; unload it first",
            "lora_path",
            code="name_taken",
            status=409,
        )
    known = KnownAdapter(name, model, path)
    if before is None:
        spec = AdapterSpec(model=model, path=path, by=request[CALLER])
        try:
            await put(store, ADAPTERS + name, spec)
        except StoreUnavailable as error:
            raise unavailable(error) from error
        loads.registry.set(name, spec)
    failure = await loads.load(known)
    if failure is not None:
        if before is None:
            try:
                await store.delete(ADAPTERS + name)
            except StoreUnavailable as error:
                raise unavailable(error) from error
            loads.registry.set(name, None)
        raise rejected(
            f"no worker could load adapter {quoted(name)}: {failure.reason}",
            "lora_path",
            code="adapter_not_loaded",
            status=failure.status,
        )
    note(request, f"adapter {name}", None if before is None else before.path, path)
    return json_response(_state(loads, known))


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /v1/unload_lora_adapter: nobody may name an adapter any more, and every worker unloads it."""
    store, body = store_of(request), await body_of(request, UnloadAdapterBody)
    loads = _adapter_loads(service_of(request))
    name = body.lora_name
    known = loads.registry.find(name)
    if known is None:
        raise rejected(f"there is no adapter {quoted(name)}", "lora_name", code="unknown_adapter", status=404)
    spec = AdapterSpec(model=known.model, path=None, by=request[CALLER])
    try:
        await put(store, ADAPTERS + name, spec)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    workers: list[str] = [*loads.holders(known.model, name)]
    await loads.unload(known.model, name)
    loads.registry.set(name, spec)
    note(request, f"adapter {name}", known.path, None)
    return json_response(AdapterUnloaded(name, known.model, workers))


async def adapters(request: web.Request) -> web.Response:
    """GET /admin/adapters: every adapter, where it lies, and the workers that hold it as this process knows."""
    loads = service_of(request).cluster.adapters
    if loads is None:
        return json_response(AdapterList([]))
    known = await asyncio.to_thread(list, loads.registry.listed())
    return json_response(AdapterList([_state(loads, each) for each in known]))


async def scale_adapter(request: web.Request) -> web.Response:
    """POST /admin/adapters: on how many workers an adapter is to be at any time."""
    store, body = store_of(request), await body_of(request, AdapterWorkersBody)
    loads = _adapter_loads(service_of(request))
    known = await asyncio.to_thread(loads.registry.find, body.name)
    if known is None:
        raise rejected(f"there is no adapter {quoted(body.name)}", "name", code="unknown_adapter", status=404)
    if body.workers is not None and body.workers < 0:
        raise rejected(f"{body.workers} workers is too few; take 0 or more", "workers")
    before = loads.registry.workers_of(known.name)
    spec = None if body.workers is None else AdapterWorkersSpec(workers=body.workers, by=request[CALLER])
    try:
        if spec is None:
            await store.delete(ADAPTER_WORKERS + known.name)
        else:
            await put(store, ADAPTER_WORKERS + known.name, spec)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    loads.registry.set_workers(known.name, spec)
    note(request, f"workers of adapter {known.name}", before, loads.registry.workers_of(known.name))
    return json_response(_state(loads, known))


def wanted_adapters(service: Service) -> Iterator[WantedAdapter]:
    """Yield the adapters that operators want on some workers, and what there is of them."""
    loads = service.cluster.adapters
    if loads is None:
        return
    for model, level in loads.registry.wanted().items():
        for name, count in level.items():
            workers = loads.holders(model, name)
            loading = [one for one in workers if loads.pending(one, name) is not None]
            yield WantedAdapter(
                name=name,
                model=model,
                wanted=count,
                workers=[one for one in workers if one not in loading],
                loading=list(loading),
                why=loads.lacking(model, name),
            )


def _state(loads: AdapterLoads, known: KnownAdapter) -> AdapterState:
    workers = loads.holders(known.model, known.name)
    loading: list[WorkerId] = [one for one in workers if loads.pending(one, known.name) is not None]
    return AdapterState(
        known.name,
        known.model,
        known.path,
        [one for one in workers if one not in loading],
        list(loading),
        loads.registry.workers_of(known.name),
    )


def _only_model(service: Service, loads: AdapterLoads) -> str:
    """Return the one model that takes adapters.

    Raises:
        ClientError: there is none, or there are several.
    """
    models = loads.loading_models()
    if len(models) == 1:
        return models[0]
    if models:
        raise rejected(f"several models take adapters; name one of {', '.join(sorted(models))}", "model")
    raise rejected(
        "no worker loads adapters while it runs; set max_cpu_loras of a pool, and start vLLM with --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        code="no_adapters",
        status=409,
    )


def _adapter_loads(service: Service) -> AdapterLoads:
    loads = service.cluster.adapters
    if loads is None:
        raise rejected("this frontend loads no adapters", code="no_adapters", status=409)
    return loads
