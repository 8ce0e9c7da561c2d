"""Planner plugins in other processes, over Penstock's own gRPC package `penstock.planner.v1`."""
