"""Tuning: searches settings by simulation on a trace, and holds out its last part."""
