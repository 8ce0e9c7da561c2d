"""The design space of disaggregated serving: mappings of both pools, rate matching, Pareto frontiers."""
