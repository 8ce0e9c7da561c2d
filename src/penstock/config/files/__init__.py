"""Readers of the files that settings point to: profiles, timing tables and modules of planner plugins."""
