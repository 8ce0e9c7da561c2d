"""How are chat and text completions answered? Read, count tokens, ask the router, and let the exchange run."""

import time

from penstock.adapters.telemetry.otel import Span
from penstock.frontend.body import Endpoint, Parsed
from penstock.frontend.caller import Caller
from penstock.frontend.exchange import Exchange
from penstock.frontend.hints import Hints, read_hints
from penstock.frontend.job import Job
from penstock.frontend.prompts import Prompt
from penstock.frontend.service import Resolved, Service, check_prompt
from penstock.frontend.splitting import digest_of, is_whole, media_of
from penstock.frontend.timing import Timing
from penstock.kernel.errors import ClientError, OverloadedError, PenstockError
from penstock.kernel.machine import nanos
from penstock.kernel.values import RequestId
from penstock.router.events import Arrived, Closed
from penstock.router.recorded import record_of

UNKNOWN = "unknown"
"""Metric label of a request whose model is none of ours: names that clients make up must not become labels."""


async def chat_completions(service: Service, caller: Caller) -> None:
    """POST /v1/chat/completions"""
    await _completions(service, caller, "chat_completions")


async def text_completions(service: Service, caller: Caller) -> None:
    """POST /v1/completions"""
    await _completions(service, caller, "completions")


async def _completions(service: Service, caller: Caller, endpoint: Endpoint) -> None:
    timing = Timing()
    parsed: Parsed | None = None
    resolved: Resolved | None = None
    try:
        parsed = await service.prompts.parse(endpoint, await caller.body())
        resolved = service.resolve(parsed.model)
        hints = read_hints(caller.headers, parsed.nvext, parsed.fields)
        prompt = await _prepare(service, parsed, resolved, hints)
    except PenstockError as error:
        model = UNKNOWN if resolved is None else resolved.model
        service.metrics.refused(model, endpoint, bool(parsed and parsed.stream), refusal(error))
        raise
    service.metrics.stage("preprocess", time.monotonic() - timing.arrived)
    job = Job(
        path=parsed.path,
        body=parsed.raw,
        content_type="application/json",
        endpoint=endpoint,
        streamed=parsed.stream,
        parsed=parsed,
        hints=hints,
        strip_usage=parsed.stream and not parsed.wants_usage,
    )
    await carry(caller, service, resolved, job, prompt, timing)


async def carry(caller: Caller, service: Service, resolved: Resolved, job: Job, prompt: Prompt, timing: Timing) -> None:
    """Route a request and answer it; count it, log it and write it down however it ends."""
    hints = job.hints or Hints(read_hints(caller.headers, {}, {}).preferences)
    model = resolved.model
    span = service.tracer.start(job.endpoint, caller.headers.get("traceparent"), caller.headers.get("tracestate"))
    limit = hints.timeout or service.settings.frontend.limits.deadline

    def event(request_id: RequestId) -> Arrived:
        return Arrived(
            id=request_id,
            model=model,
            isl=prompt.isl,
            blocks=prompt.blocks,
            text=prompt.estimated,
            media=0 if job.parsed is None else len(media_of(job.parsed)),
            whole=job.parsed is None or is_whole(job.parsed),
            adapter=resolved.adapter,
            deadline=None if limit is None else service.cluster.now() + nanos(limit),
            preferences=hints.preferences,
        )

    service.metrics.started(model, job.endpoint, job.streamed, hints.context_type)
    ticket = service.arrive(event, caller.id)
    caller.id = ticket.id
    exchange = Exchange(caller, service, resolved, job, prompt, ticket, span, timing)
    try:
        await exchange.run()
    finally:
        if ticket.closed is not None:
            _over(caller, service, exchange, ticket.closed, hints.context_type)


async def _prepare(service: Service, parsed: Parsed, resolved: Resolved, hints: Hints) -> Prompt:
    media = tuple(digest_of(part) for part in media_of(parsed))
    hashing = service.hashing(resolved, hints.salt, media)
    prompt = await service.prompts.prepare(parsed, resolved.tokenizer, hashing, hints.token_data)
    if not prompt.estimated:
        param = "messages" if parsed.endpoint == "chat_completions" else "prompt"
        check_prompt(resolved, prompt.isl, service.settings.frontend.limits.prompt_max, param)
    return prompt


def _over(caller: Caller, service: Service, exchange: Exchange, closed: Closed, context_type: str | None) -> None:
    """Count and write down a request that is over."""
    timing, job, model = exchange.timing, exchange.job, exchange.resolved.model
    now = time.monotonic()
    service.metrics.ended(model, job.endpoint, job.streamed, error_type(closed), now - timing.arrived)
    if closed.outcome == "ok" and timing.ttft is not None and closed.legs:
        target = closed.legs[-1].target
        service.metrics.timed(model, target.worker, target.rank, timing.ttft, timing.itl)
    record = record_of(
        closed,
        offset=service.run_offset,
        blocks=exchange.prompt.blocks,
        itl=timing.summary(),
        ttft=timing.ttft,
        e2e=timing.e2e,
        service_class=context_type,
    )
    service.records.write(record)
    service.seen.ended(record, service.settings.slo.ttft, service.settings.slo.itl)
    service.counts.of(model).end(record, service.held_to)
    target_name = str(closed.legs[-1].target) if closed.legs else None
    caller.fields.update(
        model=model,
        outcome=closed.outcome,
        worker=target_name,
        isl=closed.isl,
        osl=closed.osl,
        cached=closed.cached,
        ttft=None if timing.ttft is None else round(timing.ttft, 6),
        attempts=closed.attempts if closed.attempts > 1 else None,
        reason=None if closed.outcome == "ok" else closed.reason,
    )
    _end_span(exchange.span, closed, target_name)


def _end_span(span: Span, closed: Closed, worker: str | None) -> None:
    if not span.kept:
        return
    span.set("penstock.request", closed.id)
    span.set("penstock.worker", worker)
    span.set("penstock.expected_cached_tokens", closed.expected_cached)
    span.set("gen_ai.request.model", closed.model)
    span.set("gen_ai.usage.input_tokens", closed.isl)
    span.set("gen_ai.usage.output_tokens", closed.osl)
    span.end(None if closed.outcome == "ok" else closed.reason)


def error_type(closed: Closed) -> str:
    """Return the metric label of how a request ended; empty where it went well."""
    if closed.outcome == "ok":
        return ""
    if closed.outcome == "cancelled":
        return "cancelled"
    by_fault = {"client": "validation", "overloaded": "overload", "deadline": "response_timeout"}
    return by_fault.get(closed.fault, "internal")


def refusal(error: PenstockError) -> str:
    """Return the metric label of a request that was refused before it was routed."""
    if isinstance(error, OverloadedError):
        return "overload"
    if isinstance(error, ClientError):
        return "not_found" if error.status == 404 else "validation"
    return "internal"
