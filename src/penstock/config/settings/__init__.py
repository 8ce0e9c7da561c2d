"""Tree of settings structs: cluster, frontend, discovery and planning."""
