"""Selection of a worker: cost functions, the choice of a candidate and session affinity."""
