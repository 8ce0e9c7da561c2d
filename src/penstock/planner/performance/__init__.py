"""Performance models of engines: one Protocol, and a model for each source of measurements."""
