"""What is sent to an engine for a request? Its body with as little changed as can be, and its headers."""

from collections.abc import Mapping
from dataclasses import dataclass

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


def engine_body(job: Job) -> bytes:
    """Return the body for the engine."""
    parsed = job.parsed
    if parsed is None:
        return job.body
    added: dict[str, object] = {}
    if job.strip_usage:
        # The true output and cached tokens stand nowhere else.
        options = dict(parsed.fields.get("stream_options") or {})
        options.pop("continuous_usage_stats", None)
        added["stream_options"] = {**options, "include_usage": True}
    salt = None if job.hints is None else job.hints.salt
    if salt is not None and parsed.fields.get("cache_salt") != salt:
        added["cache_salt"] = salt
    return with_fields(parsed, added)


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
    if word.card.ranks > 1:
        headers["x-data-parallel-rank"] = str(word.target.rank)
    return headers
