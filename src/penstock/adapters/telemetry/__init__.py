"""What is told to the outside: Prometheus metrics and OTLP spans."""
