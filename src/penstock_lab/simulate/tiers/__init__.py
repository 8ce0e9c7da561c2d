"""Tiers of simulated engines: the tier machine of live ones, with link models."""
