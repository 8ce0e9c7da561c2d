"""How long random tests look: a part of it in ``make test``, which has minutes, and all of it in ``make nightly``."""

import math
import os

DEPTH = float(os.environ.get("PENSTOCK_DEPTH", "0.2"))
"""Share of the examples and seeds that are tried; more than 1 looks longer than the nightly."""


def deep(count: int) -> int:
    """Return how many of ``count`` examples are to be tried."""
    return max(1, math.ceil(count * DEPTH))


def seeds(count: int, chunk: int) -> range:
    """Return the first seed of each chunk of so many: PENSTOCK_SEEDS of them, or their share of ``count``."""
    wanted = int(os.environ.get("PENSTOCK_SEEDS", deep(count)))
    return range(0, wanted, chunk)
