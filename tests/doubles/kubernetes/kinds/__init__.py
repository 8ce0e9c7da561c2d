"""Kinds in the API server's double: the table of them, their defaults and rules, columns, discovery and OpenAPI."""
