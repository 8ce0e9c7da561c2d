"""OpenAI routes: chat and text completions, models, health, and the allow-list of passed-on routes."""
