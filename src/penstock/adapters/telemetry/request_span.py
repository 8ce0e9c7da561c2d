"""`RequestSpan`: one request as a span of a trace, and the tracer of a frontend that makes none."""

from collections.abc import Mapping
from typing import Any, Protocol

Attribute = str | int | float | bool | None


class RequestSpan:
    """One request's span; harmless where tracing is off."""

    __slots__ = ("_api", "_span", "sampled", "traceparent")

    def __init__(self, api: Any = None, span: Any = None) -> None:
        self._api = api
        self._span = span
        self.sampled = span is not None
        """Whether the span will be exported."""
        self.traceparent: str | None = None
        """The header for the engine, so that its spans are children of this one; None where tracing is off."""
        if span is not None:
            context = span.get_span_context()
            self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, name: str, value: Attribute) -> None:
        """Set an attribute; None is left out."""
        if self._span is not None and value is not None:
            self._span.set_attribute(name, value)

    def event(self, name: str, attributes: Mapping[str, Attribute] | None = None, at: int | None = None) -> None:
        """Mark a moment, such as the first token; ``at``: nanoseconds since 1970, where it is over."""
        if self._span is not None:
            known = {name: value for name, value in (attributes or {}).items() if value is not None}
            self._span.add_event(name, known, at)

    def end(self, error: str | None = None) -> None:
        """End the span, with an error or without one."""
        if self._span is None:
            return
        if error is not None:
            self._span.set_status(self._api.StatusCode.ERROR, error)
        self._span.end()
        self._span = None
        self.sampled = False


NO_SPAN = RequestSpan()
"""Of every request where tracing is off."""


class Tracer(Protocol):
    """Makes spans."""

    enabled: bool

    def start(self, name: str, traceparent: str | None, tracestate: str | None = None) -> RequestSpan:
        """Start a span below the caller's trace, or a new trace where it has none."""
        ...

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""
        ...


class NoTracer:
    """The `Tracer` where tracing is off."""

    enabled = False

    def start(self, name: str, traceparent: str | None, tracestate: str | None = None) -> RequestSpan:
        return NO_SPAN

    def close(self) -> None:
        """There is nothing to send."""
