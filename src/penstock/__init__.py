"""Penstock: one service of many LLM inference engines."""

__version__ = "0.1.0"
