"""Exchange: one request between client and engines, with its attempts, prefill stages, migration and stream."""
