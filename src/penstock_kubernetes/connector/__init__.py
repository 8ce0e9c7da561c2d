"""Connector of a planner on Kubernetes: scales graph deployments, what has a scale of its own, and our clusters."""
