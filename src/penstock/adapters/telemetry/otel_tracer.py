"""OpenTelemetry tracer: turns requests into OTLP spans; the library is imported only if an endpoint is configured."""

import importlib
from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import ConfigError

Attribute = str | int | float | bool | None
EXTRA = "pip install 'penstock[otel]'"


class OtelSpan:
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


NO_SPAN = OtelSpan()
"""Of every request where tracing is off."""


class OtelTracer:
    """Makes spans.

    Args:
        endpoint: base URL that takes OTLP over HTTP, such as ``http://127.0.0.1:4318``; ``/v1/traces`` is added where
            it is missing. None switches tracing off.
    Raises:
        ConfigError: an endpoint is given and the libraries of the extra are not installed.
    """

    def __init__(self, endpoint: str | None) -> None:
        self.enabled = endpoint is not None
        self._provider: Any = None
        self._tracer: Any = None
        self._trace: Any = None
        self._propagator: Any = None
        if endpoint is None:
            return
        url = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
            # Some versions import their HTTP library only here.
            exporter = otlp.OTLPSpanExporter(endpoint=url, timeout=5)
        except ImportError as error:
            raise ConfigError(
                f"frontend.otlp_endpoint is set, but {error.name} is not installed", hint=f"{EXTRA}, or unset it"
            ) from error
        self._provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "penstock-frontend"}))
        # The processor has its own thread and bounded queue: a collector that is away costs spans, never traffic.
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = propagation.TraceContextTextMapPropagator()

    def start(self, name: str, traceparent: str | None, tracestate: str | None = None) -> OtelSpan:
        """Start a span below the caller's trace, or a new trace where it has none."""
        if self._tracer is None:
            return NO_SPAN
        carrier = {"traceparent": traceparent} if traceparent else {}
        if traceparent and tracestate:
            carrier["tracestate"] = tracestate
        context = self._propagator.extract(carrier)
        return OtelSpan(self._trace, self._tracer.start_span(name, context=context, kind=self._trace.SpanKind.SERVER))

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""
        if self._provider is not None:
            self._provider.force_flush(3000)
            self._provider.shutdown()
            self._provider = self._tracer = None
