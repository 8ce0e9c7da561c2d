"""Step statistics of engines: from the plug-in inside vLLM, from /metrics, or from the simulated engine."""
