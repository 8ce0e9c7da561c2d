"""How do steps of the planner run in other processes? Our own gRPC package, `penstock.planner.v1`."""
