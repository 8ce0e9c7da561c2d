"""The tier process of an engine: its server, the driver of the tier machine, its metrics and what asks it."""
