"""Limits that hold after every stage: replica bounds, GPU and power ceilings, the GPU floor, and setting checks."""
