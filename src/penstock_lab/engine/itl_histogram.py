"""`ItlHistogram`: gaps between the tokens of decoding sequences, counted by duration in steps of one per cent."""

from math import exp, log

from penstock.kernel.machine import SECOND
from penstock_lab.engine.timing.decode_steps import DecodeSteps

_STEPS = 100.0
"""Bins per factor of e: neighbours differ by 1 %."""
_PIECES = 8
"""Pieces that a long run of decode steps is cut into; within a piece its mean stands for each step."""


class ItlHistogram:
    """Gaps between tokens of all sequences that decode.

    Every sequence that decodes in a pass waited that pass for its token, and one that was preempted until it was
    computed again.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """bin -> gaps"""

    def add(self, duration: int, count: int) -> None:
        """Count gaps of so many nanoseconds."""
        place = round(log(duration) * _STEPS) if duration > 0 else 0
        counts = self.counts
        counts[place] = counts.get(place, 0) + count

    def add_steps(self, run: DecodeSteps, start: int, end: int, before: int, last: int, seqs: int) -> None:
        """Count the steps ``start`` to ``end - 1`` of a run of ``seqs`` sequences, over at ``before`` and ``last``.

        Cost: constant.
        """
        steps, after = end - start, run.after
        if steps > 2:
            # Steps of a run differ little and in one direction: where the first and the last are alike, all are.
            first_gap, last_gap = after(start + 1) - before, last - after(end - 1)
            if abs(last_gap - first_gap) * 2 * _STEPS > first_gap:
                at = start
                pieces = steps if steps < _PIECES else _PIECES
                for piece in range(1, pieces):
                    until = start + steps * piece // pieces
                    over = after(until)
                    self.add((over - before) // (until - at), (until - at) * seqs)
                    at, before = until, over
                steps = end - at
        self.add((last - before) // steps, steps * seqs)

    def pairs(self) -> list[tuple[float, int]]:
        """Return (seconds, how many of it), ascending."""
        return [(exp(place / _STEPS) / SECOND, count) for place, count in sorted(self.counts.items())]


def joined(several: list[ItlHistogram]) -> list[tuple[float, int]]:
    """Return the same of several engines together."""
    whole = ItlHistogram()
    for gaps in several:
        for place, count in gaps.counts.items():
            whole.counts[place] = whole.counts.get(place, 0) + count
    return whole.pairs()
