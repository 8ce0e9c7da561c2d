"""Stages of a request before its last one, as the frontend carries them out."""
