"""Planner plug-ins in other processes, over gRPC."""
