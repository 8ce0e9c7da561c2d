"""How often is each prefix asked for, of late? Counts that halve with time."""

from collections import OrderedDict
from typing import Any

from penstock.kernel.machine import Nanos

_HALVINGS_KEPT = 10
"""A prefix not asked for during so many half-lives is forgotten: its count is below a thousandth by then."""


class HitCounts:
    """Decayed hits per prefix, a prefix being named by the chained hash of its last block.

    Args:
        half_life: kernel nanoseconds in which a count halves.
        prefixes_max: most prefixes kept; the one not asked for the longest goes.
    """

    def __init__(self, half_life: Nanos, prefixes_max: int = 65_536) -> None:
        self.half_life = half_life
        self.prefixes_max = prefixes_max
        self._counts: OrderedDict[int, tuple[float, Nanos]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, prefix: int, now: Nanos) -> None:
        """Count one hit, and forget what expired or is too much."""
        counts = self._counts
        counts[prefix] = (self.count(prefix, now) + 1.0, now)
        counts.move_to_end(prefix)
        while counts:
            oldest = next(iter(counts))
            if len(counts) <= self.prefixes_max and now - counts[oldest][1] <= _HALVINGS_KEPT * self.half_life:
                return
            counts.popitem(last=False)

    def count(self, prefix: int, now: Nanos) -> float:
        """Return the decayed count of one prefix, 0 where it was not asked for."""
        value, at = self._counts.get(prefix, (0.0, now))
        age = max(0, now - at)
        return 0.0 if age > _HALVINGS_KEPT * self.half_life else value * 0.5 ** (age / self.half_life)

    def hottest(self, count: int, now: Nanos) -> list[tuple[int, float]]:
        """Return the prefixes asked for the most, with their counts. Cost: walks all."""
        found = [(prefix, self.count(prefix, now)) for prefix in self._counts]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:count]

    def snapshot(self) -> list[list[Any]]:
        """Return the counts as plain data."""
        return [[prefix, value, at] for prefix, (value, at) in self._counts.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Become the counts that wrote ``state``."""
        self._counts = OrderedDict((prefix, (value, at)) for prefix, value, at in state)
