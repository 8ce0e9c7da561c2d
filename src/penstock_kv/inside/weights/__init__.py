"""vLLM's loader of weights, and what it says to a weight process."""
