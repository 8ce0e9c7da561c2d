"""Layouts of KV blocks in memory, and the copies between two of them."""
