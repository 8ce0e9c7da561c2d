"""Cluster settings, declared once as structs; flags, environment names, schema and docs are derived from them."""
