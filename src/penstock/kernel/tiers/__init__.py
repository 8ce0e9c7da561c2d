"""Tiers below an engine, as all rooms see them: what blocks there are worth."""
