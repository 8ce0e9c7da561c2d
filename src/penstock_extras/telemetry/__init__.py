"""OTLP and TensorBoard."""
