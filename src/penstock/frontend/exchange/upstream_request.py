"""Upstream request: the body, changed as little as possible, and the headers that are sent to an engine."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.adapters.engines.dialects.dialect import Dialect
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.dialects.kv_transfer_protocol import PARAMS, TIERS, tier_hints_in, with_tier_hints
from penstock.adapters.engines.pool_overrides import CHAT_TEMPLATE, REASONING_PARSER, TAKEN, TOOL_PARSER
from penstock.adapters.telemetry.request_span import RequestSpan
from penstock.frontend.parsers.answer_parsing import parser_plan, raw_text_fields
from penstock.frontend.prompt.model_names import ShadowOrder
from penstock.frontend.prompt.prompt_renderer import RenderedPrompt
from penstock.frontend.prompt.request_body import Parsed, allowed_of, is_whole, with_fields, with_uuids
from penstock.frontend.prompt.routing_hints import (
    CACHE_CONTROL,
    NEXT_REQUEST_IN,
    SPECULATIVE_PREFILL,
    RoutingHints,
    digest,
)
from penstock.kernel.values import JsonObject, WorkerCard, WorkerId
from penstock.router.events import Dispatch

log = logging.getLogger("penstock.frontend")

NEEDLESS = ("stream_options", "return_token_ids", "priority")
"""Fields of ours without which an engine answers all the same; usage, migration and priority are then lost at it."""
NOTHING: frozenset[str] = frozenset()
_REFUSING_MAX = 4096
"""Workers whose refusals are remembered: where more come, each tells once more."""
_PASSED_ON = ("traceparent", "tracestate")


@dataclass(slots=True)
class UpstreamRequest:
    """A request to send, in any dialect."""

    path: str
    body: bytes
    content_type: str
    endpoint: str
    """Label of the metrics, such as ``chat_completions``."""
    streamed: bool
    parsed: Parsed | None = None
    """None for a proxied route, whose dialect is unknown."""
    hints: RoutingHints | None = None
    adds_usage: bool = False
    """Whether usage is requested although the body does not ask for it."""
    strip_usage: bool = False
    """Whether that is for Penstock only, and removed from the client's stream."""
    name: str | None = None
    """Name by which its model was asked for, where that is an alias or shared between models."""
    template: str | None = None
    """Chat template for engines that take one with each chat."""
    shadow: ShadowOrder | None = None
    """Copies that are to be sent once it has been answered."""
    copy_of: str | None = None
    """The request of which it is such a copy: no client waits for it, so it counts in no service level."""
    limits: Mapping[str, str] | None = None
    """Headers that tell the client its tenant's limits."""
    rendered: RenderedPrompt | None = None
    """Its prompt, where a render server has made tokens of it, with which an engine may begin."""
    way: str = ""
    """How it was answered by those tokens, or why it was not; empty where its model has no render server."""

    @property
    def wants_extra(self) -> bool:
        return self.parsed is not None and self.hints is not None and bool(self.hints.extra)


class RefusedFields:
    """The fields of ours that an engine refuses, as long as it runs: its requests go without them."""

    def __init__(self) -> None:
        self._refused: dict[WorkerId, tuple[int, frozenset[str]]] = {}

    def of(self, card: WorkerCard) -> frozenset[str]:
        """Return the fields that a worker does not get."""
        known = self._refused.get(card.id)
        return NOTHING if known is None or known[0] != card.incarnation else known[1]

    def note(self, card: WorkerCard, job: UpstreamRequest, refusal: str) -> frozenset[str]:
        """Return the fields that a refusal of a request names and that only we had put into it; remember them."""
        own = {} if job.parsed is None else job.parsed.fields
        words = _letters(refusal).replace("includeusage", "streamoptions")
        named = frozenset(name for name in NEEDLESS if name not in own and _letters(name) in words) - self.of(card)
        if named:
            log.warning("worker %s refuses %s: it is asked without", card.id, " and ".join(sorted(named)))
            if len(self._refused) >= _REFUSING_MAX:
                self._refused.clear()
            self._refused[card.id] = (card.incarnation, self.of(card) | named)
        return named


def _letters(text: str) -> str:
    """Return a text by which ``stream_options``, ``streamOptions`` and "stream options" are the same."""
    return "".join(filter(str.isalpha, text.lower()))


def engine_body(
    job: UpstreamRequest,
    dialect: Dialect,
    dispatch: Dispatch,
    adapter: str | None,
    *,
    token_ids: bool = False,
    handed: Mapping[str, Any] | None = None,
    parses: bool = True,
    without: Collection[str] = (),
) -> bytes:
    """Return the body for an engine, in its dialect.

    Args:
        adapter: the requested LoRA adapter of its model.
        token_ids: request the token ids of a stream's output.
        handed: fields that make it take over the KV of another engine.
        parses: its answer comes by here, so that calls may be parsed out of its text.
        without: fields of ours that it is not to get.
    """
    parsed = job.parsed
    if parsed is None:
        allowed = _allowed_engine_fields(job, dispatch.card)
        return msgspec.json.encode(msgspec.json.decode(job.body) | allowed) if allowed else job.body
    added = added_fields(job, parsed, dialect, dispatch, adapter, token_ids=token_ids, handed=handed, parses=parses)
    for name in without:
        added.pop(name, None)
    return with_fields(parsed, added)


def engine_fields(job: UpstreamRequest, dispatch: Dispatch, adapter: str | None) -> JsonObject:
    """Return the client's fields and those that are added, for a leg whose request differs from the client's."""
    assert job.parsed is not None  # routes of unknown dialect are never split into stages
    dialect = dialect_of(dispatch.card.engine)
    return {**job.parsed.fields, **added_fields(job, job.parsed, dialect, dispatch, adapter)}


def error_text(body: bytes) -> str:
    """Return the start of an engine's error text, for the log and the reason."""
    return " ".join(body[:300].decode("utf-8", "replace").split()) or "nothing"


def added_fields(
    job: UpstreamRequest,
    parsed: Parsed,
    dialect: Dialect,
    dispatch: Dispatch,
    adapter: str | None,
    *,
    token_ids: bool = False,
    handed: Mapping[str, Any] | None = None,
    parses: bool = True,
) -> JsonObject:
    """Return the fields that are added to, or replace, the client's own; `engine_body` has the arguments."""
    card = dispatch.card
    hints = job.hints
    added: JsonObject = {**(handed or {})}
    if hints is not None and hints.steering:
        added = allowed_of(hints.steering, card.labels) | added
    if job.adds_usage:
        # The exact output and cached tokens are nowhere else.
        options = dict(parsed.fields.get("stream_options") or {})
        options.pop("continuous_usage_stats", None)
        added["stream_options"] = {**options, "include_usage": True}
    if token_ids and not parsed.fields.get("return_token_ids"):
        added["return_token_ids"] = True
    if job.template is not None and card.labels.get(CHAT_TEMPLATE) == TAKEN and "chat_template" not in parsed.fields:
        added["chat_template"] = job.template
    # Only an engine that schedules by priority takes one; the client's own field is passed on unchanged.
    heard = card.labels.get("priority") == "on" and "priority" not in parsed.fields
    priority = 0 if hints is None else hints.preferences.priority
    fields = dialect.fields(
        card.model,
        adapter=adapter,
        priority=priority if heard else None,
        salt=None if hints is None else hints.salt,
        chat=parsed.endpoint == "chat_completions",
    )
    if parses and card.labels and (TOOL_PARSER in card.labels or REASONING_PARSER in card.labels):
        plan = parser_plan(card, parsed)
        fields |= {} if plan is None else raw_text_fields(plan, dialect, parsed)
    if dialect.rank_field is not None and card.ranks > 1:
        fields[dialect.rank_field] = dispatch.target.rank
    if dialect.media_uuid and parsed.media:
        named = with_uuids(parsed)
        if named is not None:
            added["messages"] = named
    for name, value in fields.items():
        if parsed.fields.get(name) != value:
            added[name] = value
    after = dispatch.prefetch_after
    if PARAMS in added or after is not None or (hints is not None and (hints.pin or hints.keep)):
        _add_tier_hints(added, job, card, after)
    return added


def pins(card: WorkerCard) -> bool:
    """Return whether an engine has tiers that heed a pin and a priority."""
    return card.labels.get(TIERS) == "priority"


def ignored_hints(job: UpstreamRequest, dispatch: Dispatch | None) -> tuple[str, ...]:
    """Return the hints of a request that have no effect on the workers that took it; no worker: on none."""
    hints = job.hints
    if hints is None:
        return ()
    ignored = hints.ignored
    if hints.withheld:
        allowed = {} if dispatch is None else _allowed_engine_fields(job, dispatch.card)
        ignored = (*(name for name in hints.withheld if name not in allowed), *ignored)
    if hints.warms and (not has_next_turn(job) if dispatch is None else warming_card(job, dispatch) is None):
        ignored = (SPECULATIVE_PREFILL, *ignored)
    if dispatch is None:
        return ignored
    source = None if dispatch.handoff is None else dispatch.handoff.source
    if hints.preferences.next_in is not None and TIERS not in dispatch.card.labels:
        ignored = (NEXT_REQUEST_IN, *ignored)
    if not hints.asks_pin or pins(dispatch.card) or (source is not None and pins(source)):
        return ignored
    return (CACHE_CONTROL, *ignored)


def has_next_turn(job: UpstreamRequest) -> bool:
    """Return whether a request is a chat with one answer, to which another question may follow."""
    parsed = job.parsed
    if parsed is None or parsed.endpoint != "chat_completions" or is_whole(parsed):
        return False
    return not parsed.fields.get("continue_final_message")


def warming_card(job: UpstreamRequest, dispatch: Dispatch) -> WorkerCard | None:
    """Return the worker that can compute the next turn's beginning, which is the one that did this one's; or None."""
    handoff = dispatch.handoff
    if not has_next_turn(job):
        return None
    if handoff is None or handoff.source is None:
        return dispatch.card
    # There a worker for prefill takes only what a worker for decode fetches at the same time.
    return None if handoff.protocol == "bootstrap" else handoff.source


def _allowed_engine_fields(job: UpstreamRequest, card: WorkerCard) -> JsonObject:
    """Return the client's own fields that steer an engine, as far as its pool allows them."""
    return {} if job.hints is None or not job.hints.steering else allowed_of(job.hints.steering, card.labels)


def _add_tier_hints(added: JsonObject, job: UpstreamRequest, card: WorkerCard, after: float | None) -> None:
    """Put the hints for KV tiers beside a hand-off's parameters; what the client itself may write there wins."""
    hints = job.hints
    own = tier_hints_in(_allowed_engine_fields(job, card))
    wanted: JsonObject = {}
    if hints is not None and pins(card):
        wanted = {name: value for name, value in (("pin", hints.pin), ("priority", hints.keep)) if value}
    if after is not None and TIERS in card.labels:
        wanted |= {"prefetch": True, "after": after}
    params = added.get(PARAMS) or {}
    if wanted | own and isinstance(params, dict):  # else the engine says what is wrong with the client's
        added[PARAMS] = with_tier_hints(params, wanted | own)


def engine_headers(
    job: UpstreamRequest,
    dialect: Dialect,
    dispatch: Dispatch,
    request: str,
    client: Mapping[str, str],
    span: RequestSpan,
) -> dict[str, str]:
    """Return the headers for the engine. Of the client's only its trace is passed on, never its keys."""
    headers = {"content-type": job.content_type, **dialect.headers(request)}
    for name in _PASSED_ON:
        value = client.get(name)
        if value is not None:
            headers[name] = value
    if span.traceparent is not None:
        headers["traceparent"] = span.traceparent
    if dialect.rank_header is not None and dispatch.card.ranks > 1:
        headers[dialect.rank_header] = str(dispatch.target.rank)
    session = None if job.hints is None else job.hints.preferences.session
    if session is not None and dialect.session_header is not None:
        headers[dialect.session_header] = session if session.isascii() else digest(session)
    return headers
