"""Extras: batches, jobs of engines, audit, shadows, JWT, planner plug-ins over gRPC, OTLP, TensorBoard."""
