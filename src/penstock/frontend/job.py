"""What is sent to an engine for a request? Its body with as little changed as can be, and its headers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.adapters.engines.dialects import dialect_of
from penstock.adapters.telemetry.otel import Span
from penstock.frontend.body import Parsed, with_fields
from penstock.frontend.hints import Hints
from penstock.router.events import Dispatch

_PASSED_ON = ("traceparent", "tracestate")


@dataclass(slots=True)
class Job:
    """What is to be sent, in any dialect."""

    path: str
    body: bytes
    content_type: str
    endpoint: str
    """Label of the metrics, such as ``chat_completions``."""
    streamed: bool
    parsed: Parsed | None = None
    """Absent for a proxied route, whose dialect we do not know."""
    hints: Hints | None = None
    strip_usage: bool = False
    """Usage is asked for in the client's place and taken out of its stream."""

    @property
    def wants_extra(self) -> bool:
        return self.parsed is not None and self.hints is not None and bool(self.hints.extra)


def engine_body(
    job: Job,
    word: Dispatch,
    adapter: str | None,
    *,
    token_ids: bool = False,
    handed: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the body for an engine, in its dialect.

    Args:
        adapter: the LoRA adapter of its model that is meant.
        token_ids: ask it for those of a stream's output.
        handed: what makes it take over the KV that another engine made.
    """
    parsed = job.parsed
    return job.body if parsed is None else with_fields(parsed, _added(job, parsed, word, adapter, token_ids, handed))


def engine_fields(job: Job, word: Dispatch, adapter: str | None) -> dict[str, Any]:
    """Return the same as fields, for a leg that is asked otherwise than the client asked."""
    assert job.parsed is not None  # routes whose dialect we do not know are never split
    return {**job.parsed.fields, **_added(job, job.parsed, word, adapter, False, None)}


def said(body: bytes) -> str:
    """Return the start of an engine's error text, for the log and the reason."""
    return " ".join(body[:300].decode("utf-8", "replace").split()) or "nothing"


def _added(
    job: Job,
    parsed: Parsed,
    word: Dispatch,
    adapter: str | None,
    token_ids: bool,
    handed: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what an engine is told beside, or instead of, the client's own fields."""
    card = word.card
    added: dict[str, Any] = {**(handed or {})}
    if job.strip_usage:
        # The true output and cached tokens stand nowhere else.
        options = dict(parsed.fields.get("stream_options") or {})
        options.pop("continuous_usage_stats", None)
        added["stream_options"] = {**options, "include_usage": True}
    if token_ids and not parsed.fields.get("return_token_ids"):
        added["return_token_ids"] = True
    hints = job.hints
    # Only one that schedules by priority takes any; the client's own word for it is passed on as it is.
    heard = hints is not None and card.labels.get("priority") == "on" and "priority" not in parsed.fields
    dialect = dialect_of(card.engine)
    told = dialect.fields(
        card.model,
        adapter=adapter,
        priority=hints.preferences.priority if hints is not None and heard else 0,
        salt=None if hints is None else hints.salt,
    )
    if dialect.rank_field is not None and card.ranks > 1:
        told[dialect.rank_field] = word.target.rank
    for name, value in told.items():
        if parsed.fields.get(name) != value:
            added[name] = value
    return added


def engine_headers(job: Job, word: Dispatch, request: str, client: Mapping[str, str], span: Span) -> dict[str, str]:
    """Return the headers for the engine. Of the client's only its trace is passed on, never its keys."""
    headers = {"content-type": job.content_type, "x-request-id": request}
    for name in _PASSED_ON:
        value = client.get(name)
        if value is not None:
            headers[name] = value
    own = span.traceparent
    if own is not None:
        headers["traceparent"] = own
    rank = dialect_of(word.card.engine).rank_header
    if rank is not None and word.card.ranks > 1:
        headers[rank] = str(word.target.rank)
    return headers
