"""Frontend: the HTTP endpoint with the OpenAI dialect, streaming, tokenising, hints, limits, metrics and admin page."""
