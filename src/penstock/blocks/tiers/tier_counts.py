"""Counters of the tier machine, for metrics."""

import msgspec


class TierCounts(msgspec.Struct):
    """What one tier did since the start; blocks, unless a field says bytes.

    ``peer`` counts all peers together.
    """

    hits: int = 0
    """Blocks that were loaded into the engine from here."""
    stored: int = 0
    removed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    skipped: dict[str, int] = {}
    """Not put here, by reason: ``full``, ``busy``, ``resting``, ``evicted``, ``present``, ``first use``, ..."""
    failed: int = 0
    """Did not arrive here or from here, for whatever reason."""
    corrupt: int = 0
    late: int = 0
    """Moves whose deadline passed."""
    hints_ignored: int = 0
    """Blocks whose pin or priority the eviction order can't honour."""
    lost: int = 0
    """Evicted before they could be written to any lower tier."""

    def skip(self, reason: str, blocks: int) -> None:
        if blocks:
            self.skipped[reason] = self.skipped.get(reason, 0) + blocks


class MachineCounts(msgspec.Struct):
    """What the machine did since the start."""

    queried: int = 0
    """Blocks that an engine asked for."""
    answered: int = 0
    """Of those, blocks that it was told to load."""
    not_answered: dict[str, int] = {}
    """Blocks that it was not told to load, by reason."""
    loaded: int = 0
    missed: dict[str, int] = {}
    """Blocks that it wanted and did not get, by the reason of the first of them."""
    prefetched: int = 0
    """Brought up before anybody asked for them..."""
    prefetch_hits: int = 0
    """... and loaded later, each counted once..."""
    prefetch_wasted: int = 0
    """... or evicted before."""
    unknown: int = 0
    """Answers and cancellations with an id that is not open."""

    def miss(self, reason: str, blocks: int) -> None:
        self.missed[reason] = self.missed.get(reason, 0) + blocks

    def refuse(self, reason: str, blocks: int) -> None:
        self.not_answered[reason] = self.not_answered.get(reason, 0) + blocks
