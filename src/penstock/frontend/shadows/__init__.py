"""Shadows: requests sent a second time to another model, and their answers compared."""
