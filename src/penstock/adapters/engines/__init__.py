"""Engines: HTTP dialects, KV events, step statistics, launch and description, and the simulated engine as a process."""
