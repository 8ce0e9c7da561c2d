"""Timing models of the simulated engine (tables, operators, roofline) and what fits them to measurements."""
