"""KV companion: the block manager, its tiers, the transfer library, weights, and what an engine's process loads."""
