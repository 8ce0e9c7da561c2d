"""Stores of KV blocks that fail closed: a record has key, length, checksum and generation, or it is a miss."""
