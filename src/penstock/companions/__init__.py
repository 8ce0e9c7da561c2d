"""Companions of the server: what each adds to it, as entry points of the distribution name them."""
