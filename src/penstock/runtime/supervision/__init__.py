"""Supervision: engines, frontends and the planner as child processes, reconciler, drain, rolling restart."""
