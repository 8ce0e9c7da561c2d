"""Planner plugins: their results, their registry, their context, and the merge of their answers."""
