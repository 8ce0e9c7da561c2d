"""The router machine: request life cycle, worker roster, KV index, cost, queue and active sequences."""
