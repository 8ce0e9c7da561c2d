"""Cluster state in the store: membership, desired state and status, drains, settings, crashes, replica sync."""
