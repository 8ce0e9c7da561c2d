"""Admin routes for observation: status, explain, newest requests and decisions; and the reset of KV caches."""

import asyncio
import time
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web

import penstock
from penstock.adapters.engines.dialects.dialect import Dialect
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import EngineUnreachable
from penstock.adapters.engines.probe import step
from penstock.frontend.admin import past_requests
from penstock.frontend.admin.admin_query import QueryLimits, limits_of, of_this_process
from penstock.frontend.admin.frontend_peers import findings, from_peers
from penstock.frontend.admin.request_history import DECISIONS_MAX
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import read_body, service_of
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import Service
from penstock.kernel.errors import EngineError
from penstock.kernel.latency_bins import join, quantiles
from penstock.kernel.time_windows import QUANTILES, TimeWindow
from penstock.kernel.values import WorkerCard

CLEAR_TIMEOUT = 10.0
"""Seconds that an engine has to reset its prefix cache."""


async def status(request: web.Request) -> web.Response:
    """GET /admin/status: of several frontend processes the counts of requests are added up."""
    service = service_of(request)
    status = status_of(service)
    minute = service.timeline_store.last_minute()
    if of_this_process(request):
        return json_response({**status, "last_minute": _bins_of(minute)})
    for other in await from_peers(service, "/admin/status?scope=process"):
        _add_counts(status, other)
        _add_bins(minute, other["last_minute"])
    if service.ledger is not None:
        for ended in await asyncio.to_thread(service.ledger.ended, status["frontends"]):
            _add_counts(status, ended)
    return json_response({**status, "last_minute": last_minute(minute)})


async def explain(request: web.Request) -> web.Response:
    """GET /admin/explain/{id}: where a request went and why; asks the other frontends where it is unknown here."""
    service = service_of(request)
    wanted = request.match_info["request"]
    explanation = service.history.explain(wanted)
    if explanation is None and not of_this_process(request):
        others = await from_peers(service, f"/admin/explain/{quote(wanted, safe='')}?scope=process")
        explanation = others[0] if others else None
        if explanation is None and service.run:
            explanation = await asyncio.to_thread(past_requests.explain, Path(service.run), wanted)
    if explanation is None:
        raise rejected(
            f"no request {quoted(wanted)} is known: the last {DECISIONS_MAX} decisions are kept, older ones as far as "
            "the run "
            "folder has them, and ids stand in the response header x-penstock-request-id; GET /admin/requests lists "
            "the newest",
            code="unknown_request",
            status=404,
        )
    return json_response(explanation)


async def requests(request: web.Request) -> web.Response:
    """GET /admin/requests?limit=N&before=SECONDS: the newest ends first."""
    limits = limits_of(request)
    newest = service_of(request).history.last_closed(limits.limit, limits.before)
    return json_response(await _newest(request, "requests", "closed", newest, limits))


async def decisions(request: web.Request) -> web.Response:
    """GET /admin/decisions?limit=N&before=SECONDS&worker=ID: the newest first."""
    limits = limits_of(request)
    newest = service_of(request).history.last_decisions(limits.limit, limits.before, limits.worker)
    return json_response(await _newest(request, "decisions", "at", newest, limits))


async def clear_kv_blocks(request: web.Request) -> web.Response:
    """POST /clear_kv_blocks: reset the prefix cache of every engine, or of those of the model in the body."""
    service = service_of(request)
    await read_body(request)
    model = request.query.get("model")
    if model is not None:
        model = service.resolve(model).model
    cards = [card for card in service.cluster.cards() if model is None or card.model == model]
    results = await asyncio.gather(*(_clear(service, card) for card in cards))
    done = sum(1 for result in results if result["cleared"])
    return json_response(
        {"cleared": done, "failed": len(results) - done, "workers": results},
        200 if done == len(results) else 502,
    )


def status_of(service: Service) -> dict[str, Any]:
    """Return the whole status for operators."""
    status = service.cluster.status()
    settings = service.settings
    for model in status["models"]:
        configured = settings.models.get(model["name"])
        model["tokenizer"] = None if configured is None else configured.tokenizer
    known = {model["name"] for model in status["models"]}
    for name, configured in settings.models.items():
        if name not in known:
            status["models"].append(_absent(name, configured.tokenizer))
    for name, tokenizer in service.tokenizers.items():
        if tokenizer is None:
            status["findings"].append(
                {
                    "level": "info",
                    "text": f"{name} has no local tokenizer: it is routed by hashed text blocks",
                    "hint": f"set models.{name}.tokenizer to the model's folder for exact prefixes",
                }
            )
        elif settings.frontend.tokenize.cache_bytes and not tokenizer.caches:
            status["findings"].append(
                {
                    "level": "info",
                    "text": f"the tokenizer cache of {name} is off: {tokenizer.why_no_cache}",
                    "hint": "prompts are tokenised whole, which costs CPU and changes nothing else",
                }
            )
    requests = status["requests"]
    counters = service.cluster.counters()
    return {
        "cluster": settings.name,
        "version": penstock.__version__,
        "run": service.run,
        "endpoint": service.urls.get("endpoint", ""),
        "uptime": round(time.monotonic() - service.started, 3),
        "draining": service.draining,
        "mode": status["mode"],
        "models": status["models"],
        "workers": status["workers"],
        "queue": status["queue"],
        "requests": {**requests, "http_inflight": service.inflight},
        "hit_rate": status["hit_rate"],
        "crashes": status.get("crashes", []),
        "findings": status["findings"] + findings(service),
        "frontends": status.get("frontends", []),
        "planner": status.get("planner"),
        "tokenizers": {
            name: {
                "caches": tokenizer.caches,
                "hits": tokenizer.hits,
                "misses": tokenizer.misses,
                "cache_bytes": tokenizer.cache_bytes,
                "tokens_cached": tokenizer.tokens_cached,
                "tokens_encoded": tokenizer.tokens_encoded,
            }
            for name, tokenizer in service.tokenizers.items()
            if tokenizer is not None
        },
        "loop": {"longest": counters.get("loop_longest"), "recent": counters.get("loop_recent")},
        "router_faults": status.get("router_faults", 0),
    }


def _absent(name: str, tokenizer: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "block_size": None,
        "max_len": None,
        "ready": False,
        "workers": 0,
        "index": "off",
        "index_pairs": None,
        "hit_rate": None,
        "inflight": 0,
        "tokenizer": tokenizer,
    }


async def _clear(service: Service, card: WorkerCard) -> dict[str, Any]:
    out: dict[str, Any] = {"worker": card.id, "model": card.model, "url": card.url, "cleared": False}
    dialect = dialect_of(card.engine)
    if dialect.clear_cache is None:
        return {**out, "reason": f"{dialect.title} has no route that clears its cache"}
    try:
        code, body = await service.engines.command(card.url, dialect.clear_cache, CLEAR_TIMEOUT)
    except EngineUnreachable as error:
        return {**out, "reason": error.message}
    if code == 200:
        return {**out, "cleared": True, **await _announced(service, card, dialect)}
    if code == 404:
        hint = f"the engine has no {dialect.clear_cache}; vLLM shows it with VLLM_SERVER_DEV_MODE=1"
        return {**out, "reason": hint}
    return {**out, "reason": f"the engine answered {code}: {body[:200].decode('utf-8', 'replace')}"}


async def _announced(service: Service, card: WorkerCard, dialect: Dialect) -> dict[str, Any]:
    """Make an engine that publishes a clear only at its next step take one: until then the index holds lost blocks."""
    if not dialect.clear_is_late or not card.events:
        return {}
    try:
        async with asyncio.timeout(CLEAR_TIMEOUT):
            await step(service.engines, card, f"after-clear-{card.id}")
    except (EngineError, TimeoutError) as error:
        return {"reason": f"it will say so only with its next request: {error or 'no token in time'}"}
    return {}


async def _newest(
    request: web.Request, name: str, when: str, mine: list[dict[str, Any]], limits: QueryLimits
) -> dict[str, Any]:
    """Return the newest records of all frontend processes, by the time under the key ``when``."""
    if of_this_process(request):
        return {name: mine}
    service = service_of(request)
    others = await from_peers(service, f"/admin/{name}?{urlencode({**request.query, 'scope': 'process'})}")
    records = list(chain(mine, *(other[name] for other in others)))
    if len(records) < limits.limit and service.run and not service.history.full:
        run, limit = Path(service.run), limits.limit
        if name == "requests":
            older = await asyncio.to_thread(past_requests.last_closed, run, limit, limits.before)
        else:
            older = await asyncio.to_thread(past_requests.last_decisions, run, limit, limits.before, limits.worker)
        known = {_key(record) for record in records}
        records += [record for record in older if _key(record) not in known]
    records.sort(key=lambda record: record[when], reverse=True)
    return {name: records[: limits.limit]}


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return the identity of an end or a decision, for the removal of doubles."""
    return (record.get("id"), record.get("request"), record.get("attempt"), record.get("stage"))


def last_minute(minute: TimeWindow) -> dict[str, Any]:
    """Return how fast requests were answered in the last minute: seconds, None where nothing was measured.

    ``ended``: requests that were over; TTFT counts at a request's first token, its mean ITL at its end.
    """
    summary: dict[str, Any] = {"ended": sum(minute.ended.values())}
    for name, bins in (("ttft", minute.ttft), ("itl", minute.itl)):
        for quantile, value in zip(QUANTILES, quantiles(bins, QUANTILES.values()), strict=True):
            summary[f"{name}_{quantile}"] = value
    return summary


def _bins_of(minute: TimeWindow) -> dict[str, Any]:
    """Return a minute as bins, for another process: quantiles can't be added, bins can."""
    return {"ended": minute.ended, "ttft": minute.ttft, "itl": minute.itl}


def _add_bins(minute: TimeWindow, report: dict[str, Any]) -> None:
    join(minute.ended, report["ended"])
    for bins, more in ((minute.ttft, report["ttft"]), (minute.itl, report["itl"])):
        join(bins, {int(place): number for place, number in more.items()})


def _add_counts(status: dict[str, Any], other: dict[str, Any]) -> None:
    """Add another process's counts of requests, its own alone, to a status."""
    for name, count in other["requests"].items():
        status["requests"][name] = status["requests"].get(name, 0) + count
    for model, queue in other["queue"].items():
        length = status["queue"].get(model, {}).get("length", 0)
        status["queue"][model] = {"length": length + queue["length"]}
    theirs = {model["name"]: model for model in other["models"]}
    for model in status["models"]:
        same = theirs.get(model["name"], {})
        for name in ("inflight", "ok", "rejected", "failed", "cancelled", "expired"):
            if name in model:
                model[name] += same.get(name, 0)
        for limit, count in same.get("refused", {}).items():
            model["refused"][limit] = model["refused"].get(limit, 0) + count
    served = {worker["id"]: worker for worker in other["workers"]}
    for worker in status["workers"]:
        same = served.get(worker["id"], {})
        for name in ("requests", "failures"):
            worker[name] += same.get(name, 0)
    texts = {finding["text"] for finding in status["findings"]}
    status["findings"] += [finding for finding in other["findings"] if finding["text"] not in texts]
