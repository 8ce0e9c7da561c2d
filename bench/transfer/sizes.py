"""Sizes of the transfer bench, which all of its processes share."""

TOTAL = 256 << 20
"""Bytes of one measurement: far above the processor's caches, and 0.1 s."""
BLOCKS = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
PEER_BLOCK = 1 << 20
SECRET = "the secret of a bench on one host"
