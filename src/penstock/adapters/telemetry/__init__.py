"""Telemetry: Prometheus metrics of frontends and planners, OTLP spans, TensorBoard event files."""
