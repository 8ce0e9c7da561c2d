"""Measurement of a live engine: sweeps, the profile that comes of them, what it recommends."""
