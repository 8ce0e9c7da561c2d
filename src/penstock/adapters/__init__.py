"""Adapters: each connects one outside system through the Protocols of `seams`; adapters never import each other."""
