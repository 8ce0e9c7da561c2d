"""The simulated engine: continuous batching, prefix cache, timing models, as one lazy machine."""
