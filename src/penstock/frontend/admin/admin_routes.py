"""Admin routes for observation: status, explain, newest requests and decisions; and the reset of KV caches."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

import penstock
from penstock.adapters.engines.dialects.dialect import Dialect
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import EngineUnreachable
from penstock.adapters.engines.pool_overrides import CHAT_TEMPLATE, REFUSED, UNLISTED
from penstock.adapters.engines.probe import step
from penstock.frontend.admin import request_history
from penstock.frontend.admin.adapter_routes import wanted_adapters
from penstock.frontend.admin.admin_answers import (
    ClusterStatus,
    DecisionKey,
    DecisionList,
    LastMinute,
    LastMinuteBins,
    LoopStatus,
    NameStatus,
    ProcessStatus,
    RequestList,
    RouterBelief,
    ShadowStatus,
    StatusFields,
    TokenizerStatus,
    WorkerIndex,
)
from penstock.frontend.admin.admin_query import QueryLimits, limits_of, of_this_process, seconds_of
from penstock.frontend.admin.frontend_peers import findings, from_peers
from penstock.frontend.admin.request_history import DECISIONS_MAX
from penstock.frontend.counter_ledger import counts_of
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import read_body
from penstock.frontend.openai.models import json_response
from penstock.frontend.program_ledger import join_programs
from penstock.frontend.service import Service, service_of
from penstock.kernel.errors import EngineError
from penstock.kernel.latency_bins import join, quantiles
from penstock.kernel.machine import seconds
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import Explanation
from penstock.kernel.time_windows import QUANTILES, TimeWindow
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.status_rows import ModelStatus, QueueStatus, StatusFinding
from penstock.runtime.cluster_state.fleet_api import CachesCleared, WorkerCleared
from penstock.runtime.records.usage_table import UsageTable, usage_of

Recorded = Explanation[msgspec.Raw]
_key = msgspec.json.Decoder(DecisionKey).decode

CLEAR_TIMEOUT = 10.0
"""Seconds that an engine has to reset its prefix cache."""


async def status(request: web.Request) -> web.Response:
    """GET /admin/status: of several frontend processes the counts of requests are added up."""
    service = service_of(request)
    fields = status_of(service)
    minute = service.timeline_store.last_minute()
    if of_this_process(request):
        bins = LastMinuteBins(ended=minute.ended, ttft=minute.ttft, itl=minute.itl)
        return json_response(ProcessStatus(**msgspec.structs.asdict(fields), last_minute=bins))
    for other in await from_peers(service, "/admin/status?scope=process", ProcessStatus):
        _add_peer(fields, other)
        join(minute.ended, other.last_minute.ended)
        join(minute.ttft, other.last_minute.ttft)
        join(minute.itl, other.last_minute.itl)
    fields.programs = join_programs(fields.programs)
    if service.ledger is not None:
        for counts in await asyncio.to_thread(service.ledger.ended, fields.frontends):
            counts.add_to(fields.requests, fields.models, fields.workers)
    return json_response(ClusterStatus(**msgspec.structs.asdict(fields), last_minute=last_minute(minute)))


async def explain(request: web.Request) -> web.Response:
    """GET /admin/explain/{id}: where a request went and why; asks the other frontends where it is unknown here."""
    service = service_of(request)
    wanted = request.match_info["request"]
    explanation = service.history.explain(wanted)
    if explanation is None and not of_this_process(request):
        others = await from_peers(service, f"/admin/explain/{quote(wanted, safe='')}?scope=process", Recorded)
        explanation = others[0] if others else None
        if explanation is None and service.run:
            explanation = await asyncio.to_thread(request_history.past_explanation, Path(service.run), wanted)
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
    service, limits = service_of(request), limits_of(request)
    newest = service.history.last_closed(limits.limit, limits.before)
    if not of_this_process(request):
        for other in await from_peers(service, _of_process(request), RequestList):
            newest += other.requests
        if _older_are_wanted(service, len(newest), limits):
            older = await asyncio.to_thread(request_history.past_ends, Path(service.run), limits.limit, limits.before)
            known = {each.id for each in newest}
            newest += [each for each in older if each.id not in known]
        newest.sort(key=lambda each: each.closed or 0, reverse=True)
    return json_response(RequestList(newest[: limits.limit]))


async def decisions(request: web.Request) -> web.Response:
    """GET /admin/decisions?limit=N&before=SECONDS&worker=ID: the newest first."""
    service, limits = service_of(request), limits_of(request)
    newest = service.history.last_decisions(limits.limit, limits.before, limits.worker)
    if not of_this_process(request):
        for other in await from_peers(service, _of_process(request), DecisionList[msgspec.Raw]):
            newest += other.decisions
        by_key = {_key(line): line for line in newest}
        if _older_are_wanted(service, len(newest), limits):
            run, limit = Path(service.run), limits.limit
            older = await asyncio.to_thread(request_history.past_decisions, run, limit, limits.before, limits.worker)
            by_key = {_key(line): line for line in older} | by_key
        newest = [by_key[key] for key in sorted(by_key, key=lambda key: key.at, reverse=True)]
    return json_response(DecisionList(newest[: limits.limit]))


async def clear_kv_blocks(request: web.Request) -> web.Response:
    """POST /clear_kv_blocks: reset the prefix cache of every engine, or of those of the model in the body."""
    service = service_of(request)
    await read_body(request)
    model = request.query.get("model")
    if model is not None:
        model = service.catalog.resolve(model).model
    cards = [card for card in service.cluster.cards() if model is None or card.model == model]
    results = await asyncio.gather(*(_clear(service, card) for card in cards))
    done = sum(1 for result in results if result.cleared)
    answer = CachesCleared(cleared=done, failed=len(results) - done, workers=results)
    return json_response(answer, 200 if done == len(results) else 502)


async def worker_index(request: web.Request) -> web.Response:
    """GET /admin/index/{worker}: walks the whole index, some 0.1 s for a million blocks."""
    service, worker = service_of(request), request.match_info["worker"]
    believed = service.cluster.believed(WorkerId(worker))
    if believed is None:
        text = f"no worker {quoted(worker)} is there; GET /admin/status lists those that are"
        raise rejected(text, code="unknown_worker", status=404)
    host, disk = believed.hashes
    routers = [RouterBelief(router=service.cluster.name, state=believed.state, host=host, disk=disk)]
    if not of_this_process(request):
        for other in await from_peers(service, f"/admin/index/{quote(worker, safe='')}?scope=process", WorkerIndex):
            routers += other.routers
    return json_response(WorkerIndex(routers))


async def usage(request: web.Request) -> web.Response:
    """GET /admin/usage?since=SECONDS: of all frontends of the run, as far as its records are written."""
    service = service_of(request)
    if not service.run:
        return json_response(UsageTable(rows=[]))
    since = seconds_of(request, "since", "seconds before now")
    now = seconds(service.cluster.now() + service.run_offset)
    start = 0.0 if since is None else max(0.0, now - since)
    return json_response(await asyncio.to_thread(usage_of, Path(service.run), start))


def status_of(service: Service) -> StatusFields:
    """Return the status for operators, without the last minute."""
    status = service.cluster.status()
    settings = service.settings
    for model in status.models:
        configured = settings.models.get(model.name)
        model.tokenizer = None if configured is None else configured.tokenizer
    known = {model.name for model in status.models}
    absent = [
        ModelStatus(name=name, tokenizer=configured.tokenizer)
        for name, configured in settings.models.items()
        if name not in known
    ]
    status.requests.http_inflight = service.gate.inflight
    counters = service.cluster.counters()
    return StatusFields(
        cluster=settings.name,
        version=penstock.__version__,
        run=service.run,
        endpoint=service.urls.get("endpoint", ""),
        uptime=round(time.monotonic() - service.started, 3),
        draining=service.gate.draining,
        mode=status.mode,
        models=status.models + absent,
        workers=status.workers,
        queue=status.queue,
        requests=status.requests,
        hit_rate=status.hit_rate,
        pools=status.pools,
        crashes=status.crashes,
        findings=[
            *status.findings,
            *_tokenizer_findings(service),
            *_card_findings(service),
            *_tenant_findings(service),
            *_extension_findings(service),
            *findings(service),
        ],
        frontends=status.frontends,
        planner=status.planner,
        tokenizers={
            name: TokenizerStatus(
                caches=tokenizer.caches,
                hits=tokenizer.hits,
                misses=tokenizer.misses,
                cache_bytes=tokenizer.cache_bytes,
                tokens_cached=tokenizer.tokens_cached,
                tokens_encoded=tokenizer.tokens_encoded,
            )
            for name, tokenizer in service.tokenizers.items()
            if tokenizer is not None
        },
        loop=LoopStatus(counters.get("loop_longest"), counters.get("loop_recent")),
        router_faults=status.router_faults,
        names=list(_names(service)),
        adapters=list(wanted_adapters(service)),
        programs=service.programs.newest(),
    )


def _names(service: Service) -> Iterator[NameStatus]:
    names = service.catalog.names
    service.bookkeeping.enter()
    counts = {} if service.shadows is None else service.shadows.counts
    for name in names.known():
        weights = names.weights.get(name) or {names.main(name): 1.0}
        shadows = [
            msgspec.structs.replace(counts.get((name, model)) or ShadowStatus(model=model, share=share), share=share)
            for model, share in names.shadows.get(name, {}).items()
        ]
        requests = {model: service.named.get((name, model), 0) for model in weights}
        yield NameStatus(name=name, weights=weights, requests=requests, shadows=shadows)


def _tokenizer_findings(service: Service) -> Iterator[StatusFinding]:
    for name, tokenizer in service.tokenizers.items():
        if tokenizer is None:
            text = f"{name} has no local tokenizer: it is routed by hashed text blocks"
            hint = f"set models.{name}.tokenizer to the model's folder for exact prefixes"
            yield StatusFinding("info", text, hint)
        elif service.settings.frontend.tokenize.cache_bytes and not tokenizer.caches:
            text = f"the tokenizer cache of {name} is off: {tokenizer.why_no_cache}"
            yield StatusFinding("info", text, "prompts are tokenised whole, which costs CPU and changes nothing else")


def _card_findings(service: Service) -> Iterator[StatusFinding]:
    for card in service.cluster.cards():
        if UNLISTED in card.labels:
            text = f"{card.id} serves {card.model} by the word of the settings: {card.url}{card.labels[UNLISTED]}"
            yield StatusFinding("info", text, "nothing to do while its requests are answered")
        if card.labels.get(CHAT_TEMPLATE) == REFUSED:
            text = f"{card.id} renders chats by its own template, so prefixes of models.{card.model}.chat_template miss"
            hint = "start it with that template, and label its pool chat_template: flag"
            if card.engine == "vllm":
                hint += "; or start it with --trust-request-chat-template"
            yield StatusFinding("warning", text, hint)


def _extension_findings(service: Service) -> Iterator[StatusFinding]:
    for what, why in service.extension_faults():
        yield StatusFinding("warning", f"{what} is left out: {why}", "all else goes on; restart once it is mended")


def _tenant_findings(service: Service) -> Iterator[StatusFinding]:
    audit = service.audit
    if audit is not None and (audit.failure or audit.lost):
        text = (
            f"the audit log in {audit.folder} can't be written: {audit.failure}" if audit.failure else "the audit log"
        )
        text += f"; it lacks {counted(audit.lost, 'request')}, audit.on_failure is {audit.settings.on_failure}"
        yield StatusFinding("error", text, "look after its disk; what waits is written as soon as that is possible")
    if service.budgets.failing:
        hint = "the budgets go on by what this frontend knows"
        yield StatusFinding("warning", "the tenants' budgets can't be kept in the store", hint)


async def _clear(service: Service, card: WorkerCard) -> WorkerCleared:
    def result(cleared: bool, reason: str | msgspec.UnsetType) -> WorkerCleared:
        return WorkerCleared(worker=card.id, model=card.model, url=card.url, cleared=cleared, reason=reason)

    dialect = dialect_of(card.engine)
    if dialect.clear_cache is None:
        return result(False, f"{dialect.title} has no route that clears its cache")
    try:
        code, body = await service.engines.command(card.url, dialect.clear_cache, CLEAR_TIMEOUT)
    except EngineUnreachable as error:
        return result(False, error.message)
    if code == 200:
        return result(True, await _announced(service, card, dialect))
    if code == 404:
        hint = f"the engine has no {dialect.clear_cache}; vLLM shows it with VLLM_SERVER_DEV_MODE=1"
        return result(False, hint)
    return result(False, f"the engine answered {code}: {body[:200].decode('utf-8', 'replace')}")


async def _announced(service: Service, card: WorkerCard, dialect: Dialect) -> str | msgspec.UnsetType:
    """Make an engine that publishes a clear only at its next step take one: until then the index holds lost blocks.

    Returns:
        why it has not, where that is so.
    """
    if not dialect.clear_is_late or not card.events:
        return msgspec.UNSET
    try:
        async with asyncio.timeout(CLEAR_TIMEOUT):
            await step(service.engines, card, f"after-clear-{card.id}")
    except (EngineError, TimeoutError) as error:
        return f"it will say so only with its next request: {error or 'no token in time'}"
    return msgspec.UNSET


def _of_process(request: web.Request) -> str:
    """Return the path of the same request for one other process alone."""
    return f"{request.path}?{urlencode({**request.query, 'scope': 'process'})}"


def _older_are_wanted(service: Service, count: int, limits: QueryLimits) -> bool:
    """Return whether the run folder may have records beside the ``count`` that processes remember."""
    return count < limits.limit and bool(service.run) and not service.history.full


def last_minute(minute: TimeWindow) -> LastMinute:
    """Return how fast requests were answered in a window of one minute."""
    values = {
        f"{name}_{quantile}": value
        for name, bins in (("ttft", minute.ttft), ("itl", minute.itl))
        for quantile, value in zip(QUANTILES, quantiles(bins, QUANTILES.values()), strict=True)
    }
    return LastMinute(ended=sum(minute.ended.values()), **values)


def _add_peer(status: StatusFields, other: ProcessStatus) -> None:
    """Add another process's counts and findings, its own alone, to a status."""
    counts_of(other).add_to(status.requests, status.models, status.workers)
    for name, queue in other.queue.items():
        mine = status.queue.get(name)
        status.queue[name] = QueueStatus(queue.length + (0 if mine is None else mine.length))
    refused = {model.name: model.refused for model in other.models}
    for model in status.models:
        for limit, count in refused.get(model.name, {}).items():
            model.refused[limit] = model.refused.get(limit, 0) + count
    status.programs += other.programs
    for mine_of, theirs in zip(status.names, other.names, strict=False):
        for answering, count in theirs.requests.items():
            mine_of.requests[answering] = mine_of.requests.get(answering, 0) + count
        for copies, others in zip(mine_of.shadows, theirs.shadows, strict=False):
            copies.join(others)
    texts = {finding.text for finding in status.findings}
    status.findings += [finding for finding in other.findings if finding.text not in texts]
