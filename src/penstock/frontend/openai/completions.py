"""Chat and text completions: reads the body, tokenises the prompt, routes the request and runs its exchange."""

import time
from collections.abc import Awaitable

import msgspec

from penstock.adapters.telemetry.otel_tracer import NO_SPAN, OtelSpan
from penstock.frontend.exchange.client_answer import ClientAnswer
from penstock.frontend.exchange.exchange import RequestExchange
from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.frontend.exchange.upstream_request import UpstreamRequest, ignored_hints
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.prompt.model_catalog import ResolvedModel, check_prompt
from penstock.frontend.prompt.request_body import Endpoint, Parsed, is_whole, media_id, media_of
from penstock.frontend.prompt.routing_hints import RoutingHints, read_hints
from penstock.frontend.service import Service
from penstock.kernel.errors import ClientError, OverloadedError, PenstockError
from penstock.kernel.machine import nanos
from penstock.kernel.values import Prompt
from penstock.router.events import Arrived, Closed
from penstock.router.requests.closed_record import record_of

UNKNOWN = "unknown"
"""Metric label of a request for an unknown model: names from clients must not become labels."""


def chat_completions(service: Service, caller: HttpExchange) -> Awaitable[None]:
    """POST /v1/chat/completions"""
    return _completions(service, caller, "chat_completions")


def text_completions(service: Service, caller: HttpExchange) -> Awaitable[None]:
    """POST /v1/completions"""
    return _completions(service, caller, "completions")


async def _completions(service: Service, caller: HttpExchange, endpoint: Endpoint) -> None:
    timing = TokenTiming()
    parsed: Parsed | None = None
    resolved: ResolvedModel | None = None
    try:
        parsed = await service.prompts.parse(endpoint, await caller.body())
        resolved = service.catalog.resolve(parsed.model)
        hints = read_hints(caller.headers, parsed.nvext, parsed.fields)
        prompt = await _prepare(service, parsed, resolved, hints)
    except PenstockError as error:
        model = UNKNOWN if resolved is None else resolved.model
        service.metrics.refused(model, endpoint, bool(parsed and parsed.stream), refusal(error))
        raise
    service.bookkeeping.add((service.metrics.stage, ("preprocess", time.monotonic() - timing.arrived)))
    job = UpstreamRequest(
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


async def carry(
    caller: HttpExchange,
    service: Service,
    resolved: ResolvedModel,
    job: UpstreamRequest,
    prompt: Prompt,
    timing: TokenTiming,
) -> None:
    """Route a request and answer it; count it, log it and record it however it ends."""
    hints = job.hints or RoutingHints(read_hints(caller.headers, {}, {}).preferences)
    preferences = hints.preferences
    span = NO_SPAN
    if service.tracer.enabled:
        span = service.tracer.start(job.endpoint, caller.headers.get("traceparent"), caller.headers.get("tracestate"))
    arrived = Arrived(
        id=service.free_id(caller.id),
        model=resolved.model,
        prompt=prompt,
        media=0 if job.parsed is None else len(job.parsed.media),
        whole=job.parsed is None or is_whole(job.parsed),
        adapter=resolved.adapter,
        deadline=None if hints.timeout is None else service.cluster.now() + nanos(hints.timeout),
        preferences=preferences,
    )
    caller.id = arrived.id
    timing.routed = time.monotonic()
    service.bookkeeping.add((_arrived, (service, arrived, job, timing)))
    ticket = service.tickets.arrive(arrived)
    answer = ClientAnswer(caller, service.exchanges, resolved, job, prompt, ticket, span, timing)
    try:
        await RequestExchange(answer).run()
    finally:
        if ticket.closed is not None:
            _over(caller, service, answer, ticket.closed, preferences.service_class)
        if service.bookkeeping.full:
            service.bookkeeping.enter()


async def _prepare(service: Service, parsed: Parsed, resolved: ResolvedModel, hints: RoutingHints) -> Prompt:
    parsed.media = tuple(map(media_id, media_of(parsed)))
    hashing = service.catalog.hashing(resolved, hints.salt, parsed.media)
    prompt = await service.prompts.prepare(parsed, resolved.tokenizer, hashing, hints.token_data)
    if not prompt.estimated:
        check_prompt(resolved, prompt.isl, service.settings.frontend.limits.prompt_max, parsed.prompt_field)
    return prompt


def _over(
    caller: HttpExchange, service: Service, answer: ClientAnswer, closed: Closed, service_class: str | None
) -> None:
    """Have an ended request counted and recorded, and tell the log about it."""
    timing = answer.timing
    service.bookkeeping.add((_ended, (service, answer, closed, service_class, time.monotonic())))
    target_name = str(closed.legs[-1].target) if closed.legs else None
    caller.fields.update(
        model=closed.model,
        outcome=closed.outcome,
        worker=target_name,
        isl=closed.isl,
        osl=closed.osl,
        cached=closed.cached,
        ttft=None if timing.ttft is None else round(timing.ttft, 6),
        attempts=closed.attempts if closed.attempts > 1 else None,
        reason=None if closed.outcome == "ok" else closed.reason,
    )
    if answer.span.sampled:
        _end_span(answer.span, closed, target_name)


def _arrived(service: Service, arrived: Arrived, job: UpstreamRequest, timing: TokenTiming) -> None:
    """Count a request that goes to the router."""
    isl, model = arrived.prompt.isl, arrived.model
    service.metrics.started(model, job.endpoint, job.streamed, arrived.preferences.service_class)
    service.timeline_store.arrived(timing.arrived + timing.lead, isl)
    service.counts.of(model).arrive(isl)
    service.history.arrived(arrived.id, nanos(timing.lead))


def _ended(service: Service, answer: ClientAnswer, closed: Closed, service_class: str | None, now: float) -> None:
    """Count and record an ended request; ``now`` is the end, of `time.monotonic`."""
    timing, job, model = answer.timing, answer.job, answer.resolved.model
    if timing.output is not None:
        timing.settle(service.metrics.gaps(model))
    service.metrics.closed(closed)
    service.metrics.ended(model, job.endpoint, job.streamed, error_type(closed), now - timing.arrived)
    if closed.outcome == "ok" and timing.ttft is not None and closed.legs:
        target = closed.legs[-1].target
        service.metrics.timed(model, target.worker, target.rank, timing.ttft, timing.itl)
    ignored: tuple[str, ...] = ()
    if job.hints is not None and job.hints.uncertain:
        ignored = ignored_hints(job, answer.speaker)
        service.metrics.ignored(model, ignored)
        service.history.ignored(closed.id, ignored)
    record = record_of(
        # One clock for the TTFT of client, page, explain and record: it begins when the request arrives here.
        msgspec.structs.replace(closed, arrived=closed.arrived - nanos(timing.lead)),
        offset=service.run_offset,
        blocks=answer.prompt.blocks,
        itl=timing.summary(),
        ttft=timing.ttft,
        e2e=timing.e2e,
        service_class=service_class,
        ignored_hints=ignored,
    )
    service.records.write(record)
    service.timeline_store.ended(now, record, service.settings.slo)
    service.counts.of(model).end(record, service.settings.slo)


def _end_span(span: OtelSpan, closed: Closed, worker: str | None) -> None:
    span.set("penstock.request", closed.id)
    span.set("penstock.worker", worker)
    span.set("penstock.expected_cached_tokens", closed.expected_cached)
    span.set("gen_ai.request.model", closed.model)
    span.set("gen_ai.usage.input_tokens", closed.isl)
    span.set("gen_ai.usage.output_tokens", closed.osl)
    span.end(None if closed.outcome == "ok" else closed.reason)


def error_type(closed: Closed) -> str:
    """Return the metric label of how a request ended; empty where it succeeded."""
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
