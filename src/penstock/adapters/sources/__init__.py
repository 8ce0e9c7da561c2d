"""Where a planner reads traffic: our own frontends, or a Prometheus."""
