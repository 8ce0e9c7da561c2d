"""Spans of the exact KV index: stretches of one chain whose blocks the same workers hold."""
