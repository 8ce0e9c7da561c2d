"""Dialects: one file per kind of engine, with what differs from the others in HTTP, metrics and KV hand-off."""
