"""What vLLM's own process loads for KV tiers and weights: only the kernel, msgspec and pyzmq are needed for it."""
