"""Weights of a sibling in an engine: the loader at vLLM's plug-in point, and what it asks of its machine."""
