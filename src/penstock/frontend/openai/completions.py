"""Chat and text completions: reads the body, tokenises the prompt, routes the request and runs its exchange."""

import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from penstock.adapters.telemetry.request_span import NO_SPAN
from penstock.frontend import decision_span
from penstock.frontend.answer_filters import TimedAnswer
from penstock.frontend.exchange.client_answer import ClientAnswer, TokenTiming
from penstock.frontend.exchange.exchange import RequestExchange
from penstock.frontend.exchange.prefix_warming import SpokenMessage
from penstock.frontend.exchange.upstream_request import UpstreamRequest, has_next_turn
from penstock.frontend.http.http_exchange import CollectedExchange, HttpExchange, NamedAnswer
from penstock.frontend.openai.request_books import SHADOW, UNKNOWN, enter_arrival, enter_end, refusal
from penstock.frontend.prompt.model_catalog import ResolvedModel, check_prompt
from penstock.frontend.prompt.model_names import ShadowOrder, as_served
from penstock.frontend.prompt.prompt_media import settle_media
from penstock.frontend.prompt.prompt_renderer import RenderedPrompt
from penstock.frontend.prompt.request_body import (
    PATHS,
    Endpoint,
    Parsed,
    is_undivided,
    is_whole,
    media_of,
    parse,
    with_fields,
)
from penstock.frontend.prompt.routing_hints import RoutingHints, read_hints, route_hints
from penstock.frontend.service import Service
from penstock.frontend.tenants.tenant_desk import TenantAdmission, most_output
from penstock.kernel.errors import EngineError, PenstockError
from penstock.kernel.machine import nanos
from penstock.kernel.values import JsonObject, MediaItem, Prompt
from penstock.router.events import Arrived, Closed


async def complete(endpoint: Endpoint, service: Service, caller: HttpExchange, label: str | None = None) -> None:
    """POST /v1/chat/completions and /v1/completions; ``label`` takes the endpoint's place in metrics and records."""
    timing = TokenTiming()
    request = await read_completion(service, endpoint, caller.body(), caller.headers, timing, caller=caller.name)
    parsed = request.parsed
    if service.exchanges.warming.open:
        service.exchanges.warming.overtaken(parsed)
    unasked = parsed.stream and not parsed.wants_usage
    job = request.job(label or endpoint, adds_usage=unasked, strip_usage=unasked)
    await carry(caller, service, request.resolved, job, request.prompt, timing)


class CompletionRequest(NamedTuple):
    """A completion that can be routed."""

    parsed: Parsed
    resolved: ResolvedModel
    hints: RoutingHints
    prompt: Prompt
    shadow: ShadowOrder | None = None
    rendered: RenderedPrompt | None = None
    way: str = ""
    """Why a render server made no tokens of it; empty where one did, or where its model has none."""

    def job(
        self, label: str, *, adds_usage: bool = False, strip_usage: bool = False, copy_of: str | None = None
    ) -> UpstreamRequest:
        """Return what an engine is asked; ``label`` is the endpoint's in metrics and records."""
        parsed, preset = self.parsed, self.resolved.preset
        return UpstreamRequest(
            path=parsed.path,
            body=parsed.raw,
            content_type="application/json",
            endpoint=label,
            streamed=parsed.stream,
            parsed=parsed,
            hints=self.hints,
            adds_usage=adds_usage,
            strip_usage=strip_usage,
            name=self.resolved.name,
            template=None if preset is None else preset.template,
            shadow=self.shadow,
            copy_of=copy_of,
            rendered=self.rendered,
            way=self.way,
        )


async def read_completion(
    service: Service,
    endpoint: Endpoint,
    body: bytes | Awaitable[bytes],
    headers: Mapping[str, str],
    timing: TokenTiming,
    model: str | None = None,
    *,
    caller: str | None = None,
    fields: JsonObject | None = None,
    direct: bool = False,
    fetch: bool = True,
) -> CompletionRequest:
    """Read a completion and count it where it is refused; ``model`` takes the place of the one that it names.

    Args:
        caller: whose it is, by name.
        fields: its body, where that is decoded already.
        direct: it is a copy for that very model, whatever else its name stands for.
        fetch: have its media fetched, and put in the place of their URLs.
    Raises:
        PenstockError: it can't be routed.
    """
    parsed: Parsed | None = None
    resolved: ResolvedModel | None = None
    shadow: ShadowOrder | None = None
    try:
        parsed = await service.prompts.parse(endpoint, body if isinstance(body, bytes) else await body, fields)
        if model is not None and model != parsed.model:
            parsed = replace(parse(endpoint, with_fields(parsed, {"model": model})), withheld=parsed.withheld)
        resolved = service.catalog.direct(parsed.model) if direct else service.catalog.resolve(parsed.model, caller)
        hints = read_hints(headers, parsed.nvext, parsed.fields)
        if parsed.withheld:
            hints = hints.with_withheld(parsed.withheld, parsed.steering)
        if resolved.special:
            by = hints.preferences.session or service.new_id()  # without a session, each request by itself
            resolved = service.catalog.route(resolved, by, caller)
            shadow = _shadow_order(service, endpoint, parsed, resolved, by)
            parsed = as_served(parsed, None if resolved.name is None else resolved.served, resolved.preset)
        if not parsed.plain and endpoint == "chat_completions" and media_of(parsed.fields):
            await settle_media(parsed, service.media, service.prompts, fetch=fetch)
        hashing = service.catalog.hashing(resolved, hints.salt, parsed.media)
        rendered, way, tokens = None, "", hints.token_data
        if resolved.render and tokens is None:
            rendered, way = await _rendered(service, resolved, parsed)
            tokens = None if rendered is None else rendered.tokens
        prompt = await service.prompts.prepare(parsed, resolved.tokenizer, hashing, tokens)
        if not prompt.estimated:
            check_prompt(resolved, prompt.isl, service.settings.frontend.limits.prompt_max, parsed.prompt_field)
    except PenstockError as error:
        name = UNKNOWN if resolved is None else resolved.model
        label = SHADOW if direct else endpoint
        service.metrics.refused(name, label, bool(parsed and parsed.stream), refusal(error))
        raise
    service.bookkeeping.add((service.metrics.stage, ("preprocess", time.monotonic() - timing.arrived)))
    return CompletionRequest(parsed, resolved, hints, prompt, shadow, rendered, way)


async def _rendered(service: Service, resolved: ResolvedModel, parsed: Parsed) -> tuple[RenderedPrompt | None, str]:
    """Have a render server make tokens of a prompt; return them, or None and why there are none."""
    if resolved.adapter is not None:
        answer: RenderedPrompt | str = "it asks for a LoRA adapter, which a render server does not know"
    else:
        answer = await service.renderer.rendered(parsed, resolved.render, probe=resolved.generates)
    if isinstance(answer, RenderedPrompt):
        return answer, ""
    return None, f"no render server made tokens of its prompt: {answer}"


async def carry(
    caller: HttpExchange,
    service: Service,
    resolved: ResolvedModel,
    job: UpstreamRequest,
    prompt: Prompt,
    timing: TokenTiming,
) -> None:
    """Route a request and answer it; count it, log it and record it however it ends."""
    if job.name is not None:
        caller.filters.insert(0, NamedAnswer(resolved.served, job.name))
    hints = job.hints or route_hints(caller.headers)
    tenant = service.gate.tenants.get(caller.name)
    if hints.pins and not service.may_pin(tenant):
        job.hints = hints = hints.unpinned()
    audited = None
    if service.audit is not None and service.audit.wants(tenant, resolved.model):
        service.audit.check()
        audited = service.audit.filter_of(caller)
        caller.filters.insert(0, audited)
    admission = None
    if tenant is not None:
        admission = _admit_tenant_request(service, caller.name, tenant, resolved, job, hints, prompt)
        hints = replace(hints, preferences=admission.preferences)
    span = NO_SPAN
    if service.tracer.enabled:
        span = service.tracer.start(job.endpoint, caller.headers.get("traceparent"), caller.headers.get("tracestate"))
    parsed = job.parsed
    whole = parsed is None or is_whole(parsed)
    arrived = Arrived(
        id=service.free_id(caller.id),
        model=resolved.model,
        prompt=prompt,
        media=() if parsed is None or not parsed.media else media_items(parsed.media, service, resolved.model),
        whole=whole,
        undivided=whole and (parsed is None or is_undivided(parsed)),
        adapter=resolved.adapter,
        deadline=None if hints.timeout is None else service.cluster.now() + nanos(hints.timeout),
        preferences=hints.preferences,
        tenant=tenant,
    )
    caller.id = arrived.id
    copied: NamedAnswer | None = None
    if job.shadow is not None:
        copied = NamedAnswer(resolved.served, None, copies=True)
        caller.filters.insert(0, copied)
    timing.routed = time.monotonic()
    service.bookkeeping.add((enter_arrival, (service, arrived, job, timing)))
    ticket = service.tickets.arrive(arrived)
    answer = ClientAnswer(caller, service.exchanges, resolved, job, prompt, ticket, span, timing)
    if hints.warms and has_next_turn(job):
        answer.spoken = SpokenMessage()
    try:
        await RequestExchange(answer).run()
    finally:
        if admission is not None:
            service.tenants.settle(admission, ticket.closed)
        if audited is not None:
            outcome = None if ticket.closed is None else ticket.closed.outcome
            audited.record(job.body, tenant, resolved.model, job.endpoint, outcome)
        if ticket.closed is not None:
            _note_end(caller, service, answer, ticket.closed, hints.preferences.service_class)
            if ticket.closed.outcome == "ok" and (answer.spoken is not None or copied is not None):
                _follow_up(service, answer, ticket.closed, copied)
        if service.bookkeeping.full:
            service.bookkeeping.enter()


def _follow_up(service: Service, answer: ClientAnswer, closed: Closed, copied: NamedAnswer | None) -> None:
    """Begin what follows a whole answer: the next turn's beginning, and copies at other models."""
    job, resolved = answer.job, answer.resolved
    if answer.spoken is not None and answer.speaker is not None:
        warming = service.exchanges.warming
        warming.begin(job, answer.spoken, answer.speaker, closed, resolved.adapter, answer.caller.headers)
    if copied is not None and job.shadow is not None and service.shadows is not None:
        answered = None if copied.copy is None else _timed(closed.id, bytes(copied.copy), answer.timing)
        send = partial(_send_copy, service, closed.id)
        service.shadows.begin(job.shadow, closed.id, resolved.served, answered, send)


def _shadow_order(
    service: Service, endpoint: Endpoint, parsed: Parsed, resolved: ResolvedModel, by: str
) -> ShadowOrder | None:
    """Return the copies that a request is to have, or None."""
    name = resolved.name
    models = () if name is None else service.catalog.names.copied_to(name, by, resolved.served)
    return ShadowOrder(name, models, endpoint, parsed.raw, parsed.stream) if name is not None and models else None


async def _send_copy(service: Service, of: str, order: ShadowOrder, model: str) -> TimedAnswer:
    """Have a copy of request ``of`` answered by a model, behind everything else.

    Raises:
        PenstockError: it can't be answered.
    """
    caller, timing = CollectedExchange(service.new_id(), PATHS[order.endpoint], SHADOW, order.body), TokenTiming()
    request = await read_completion(
        service, order.endpoint, order.body, caller.headers, timing, model=model, direct=True
    )
    await carry(caller, service, request.resolved, request.job(SHADOW, copy_of=of), request.prompt, timing)
    if caller.status != 200:
        said = caller.answer.decode("utf-8", "replace")
        raise EngineError(f"it answered {caller.status}: {said[:400]}")
    return _timed(caller.id, caller.answer, timing)


def _timed(id: str, raw: bytes, timing: TokenTiming) -> TimedAnswer:
    return TimedAnswer(id, raw, timing.ttft, timing.e2e)


def media_items(ids: tuple[str | None, ...], service: Service, model: str) -> tuple[MediaItem, ...]:
    """Return a request's media with the tokens that stand for each, as far as an engine has told them."""
    images = service.cluster.images(model)
    found = [None if id is None or images is None else images.find(id) for id in ids]
    return tuple(MediaItem(id, 0 if image is None else image.length) for id, image in zip(ids, found, strict=True))


def _admit_tenant_request(
    service: Service,
    caller: str | None,
    tenant: str,
    resolved: ResolvedModel,
    job: UpstreamRequest,
    hints: RoutingHints,
    prompt: Prompt,
) -> TenantAdmission:
    """Let a tenant's request in, with the preferences that it may have; count it where it is refused.

    Raises:
        PenstockError: a limit of the tenant refuses it.
    """
    try:
        service.check_model(caller, resolved)
        admission = service.tenants.admit(
            tenant,
            hints.preferences,
            isl=prompt.isl,
            osl=None if job.parsed is None else most_output(job.parsed.fields),
        )
    except PenstockError as error:
        service.metrics.refused(resolved.model, job.endpoint, job.streamed, refusal(error))
        raise
    job.hints = replace(hints, preferences=admission.preferences)
    job.limits = admission.headers
    return admission


def _note_end(
    caller: HttpExchange, service: Service, answer: ClientAnswer, closed: Closed, service_class: str | None
) -> None:
    """Have an ended request counted and recorded, and tell the log about it."""
    timing = answer.timing
    service.bookkeeping.add((enter_end, (service, answer, closed, service_class, time.monotonic(), caller.name)))
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
        decision_span.ended(answer.span, closed, answer.speaker)
