"""The HTTP endpoint: OpenAI dialect, streaming, tokenising, hints, limits, metrics, page."""
