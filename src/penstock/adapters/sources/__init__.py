"""Traffic sources of a planner: Penstock's own frontends, or a Prometheus."""
