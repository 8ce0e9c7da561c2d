"""The tiers of a KV cache as a machine: what is offloaded, onboarded, evicted and announced, and when."""
