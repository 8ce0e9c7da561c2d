"""Discovery in an API server."""
