"""Engines: their HTTP dialect, their KV events, and the simulated one as a process."""
