"""Copies of answered requests at other models: read, compared, counted, recorded."""
