"""`Span`: a stretch of one chain whose blocks the same workers hold, and the comparison of two stretches."""

from array import array

import numpy as np

KEY = (1 << 60) - 1
"""The maps' keys are the low 60 bits of a hash: Python keeps those in 32 bytes, 64 bits in 48."""
SPAN_MAX = 2048
"""Blocks per span: bounds the search for a block inside its span (some 10 us) and the cost of dropping one."""


class Span:
    """A stretch of a chain. ``parent`` is the hash before ``hashes[0]``, None at the root or where it is unknown.

    ``engine``: the engine's own hashes of the same blocks, for workers whose events are translated. ``odd``: some of
    them belong to other blocks too, so each must be looked up by itself. ``filed``: the map leads to every block of
    it; else to its first and its last.
    """

    __slots__ = ("engine", "filed", "hashes", "mask", "odd", "parent")

    def __init__(self, hashes: "array[int]", engine: "array[int] | None", mask: int, parent: int | None) -> None:
        self.hashes = hashes
        self.engine = engine
        self.mask = mask
        self.parent = parent
        self.odd = False
        self.filed = True


def filed_keys(span: Span) -> set[int]:
    """Return the keys under which the map leads to a span."""
    return set(keys_of(span.hashes if span.filed else array("Q", [span.hashes[0], span.hashes[-1]])))


def position_in(hashes: "array[int]", block: int) -> int:
    """Return where a block stands in a span, or -1; the ends are looked at first."""
    if hashes[-1] == block:
        return len(hashes) - 1
    try:
        return hashes.index(block)
    except ValueError:
        return -1


def agreement(span: "array[int]", position: int, event: "array[int]", start: int) -> int:
    """Count how many hashes two sequences share from these places on."""
    most = min(len(span) - position, len(event) - start)
    if span[position : position + most] == event[start : start + most]:
        return most
    same = 0
    while span[position + same] == event[start + same]:
        same += 1
    return same


def keys_of(hashes: "array[int]") -> list[int]:
    """Return the map's keys of a run of hashes: below some 32 a loop is faster than numpy's fixed cost."""
    if len(hashes) < 32:
        return [value & KEY for value in hashes]
    out: list[int] = np.bitwise_and(np.frombuffer(hashes, np.uint64), np.uint64(KEY)).tolist()
    return out
