"""Planner: how many workers of each role there should be, decided by small plugins in a machine, within hard limits."""
