"""Depth of a chain of blocks in a set that is closed under prefixes, found by bisection."""

from collections.abc import Collection, Sequence


def depth_of(blocks: Sequence[int], among: Collection[int]) -> int:
    """Count the leading blocks that are among some.

    Hashes are chained, so a holder of a block has all before it: what is counted is found by bisection.

    Args:
        among: closed under prefixes: with a block it has all before it.
    Cost: O(log n).
    """
    low, high = 0, len(blocks) if among else 0
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] in among:
            low = middle + 1
        else:
            high = middle
    return low
