"""OpenTelemetry tracer: turns requests into OTLP spans; the library is imported only if an endpoint is configured."""

import importlib
from typing import Any

from penstock.adapters.telemetry.request_span import NO_SPAN, RequestSpan
from penstock.kernel.errors import ConfigError

EXTRA = "pip install 'penstock[otel]'"


class OtelTracer:
    """Makes spans.

    Args:
        endpoint: base URL that takes OTLP over HTTP, such as ``http://127.0.0.1:4318``; ``/v1/traces`` is added where
            it is missing.
    Raises:
        ConfigError: the libraries of the extra are not installed.
    """

    enabled = True

    def __init__(self, endpoint: str) -> None:
        self._provider: Any = None
        self._tracer: Any = None
        self._trace: Any = None
        self._propagator: Any = None
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

    def start(self, name: str, traceparent: str | None, tracestate: str | None = None) -> RequestSpan:
        """Start a span below the caller's trace, or a new trace where it has none."""
        if self._tracer is None:
            return NO_SPAN
        carrier = {"traceparent": traceparent} if traceparent else {}
        if traceparent and tracestate:
            carrier["tracestate"] = tracestate
        context = self._propagator.extract(carrier)
        return RequestSpan(
            self._trace, self._tracer.start_span(name, context=context, kind=self._trace.SpanKind.SERVER)
        )

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""
        if self._provider is not None:
            self._provider.force_flush(3000)
            self._provider.shutdown()
            self._provider = self._tracer = None
