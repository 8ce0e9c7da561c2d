"""Lease book: which leases of a SQLite store are alive, as one process observes their renewals.

A lease ends when *this process observes* no renewal for ``ttl`` seconds of its monotonic clock, so a step of the wall
clock drops no owner. The wall clock decides only about a lease that is new to this process: one that was last renewed
longer ago than its ttl was left by a process that is gone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LeaseRow(NamedTuple):
    """A lease as it stands in the database: ``ttl`` in seconds, ``renewed`` in seconds of its owner's wall clock."""

    id: str
    ttl: float
    renewals: int
    renewed: float


@dataclass(slots=True)
class _LeaseSighting:
    row: LeaseRow
    unseen: float
    alive: bool


class LeaseBook:
    """What this process knows of all leases of a store; ``monotonic`` and ``wall`` are clocks in seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.longest_ttl = 0.0
        """The longest ttl of all leases so far; seconds."""
        self._monotonic = monotonic
        self._wall = wall
        self._sightings: dict[str, _LeaseSighting] = {}
        self._looked: float | None = None

    def look(self, rows: Sequence[LeaseRow]) -> None:
        """Compare all leases with those of the last call."""
        now = self._monotonic()
        elapsed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        before, self._sightings = self._sightings, {}
        for row in rows:
            sighting = before.get(row.id)
            if sighting is None:
                sighting = _LeaseSighting(row, 0.0, alive=self._is_fresh(row))
                self.longest_ttl = max(self.longest_ttl, row.ttl)
            elif sighting.row == row:
                # A late call (this process was suspended) must not by itself make every owner late.
                sighting.unseen += min(elapsed, row.ttl / 3)
            else:
                sighting.row, sighting.unseen, sighting.alive = row, 0.0, True
            self._sightings[row.id] = sighting

    @property
    def alive(self) -> frozenset[str]:
        """The leases that were alive at the last `judge`."""
        return frozenset(lease for lease, sighting in self._sightings.items() if sighting.alive)

    def is_fresh(self, lease: str) -> bool:
        """Return whether a lease is alive by the wall clock, all that a process without a watcher has."""
        sighting = self._sightings.get(lease)
        return sighting is not None and self._is_fresh(sighting.row)

    def late(self) -> list[str]:
        """Return the leases that missed a renewal and still count as alive.

        Owners renew every third of their ttl, and after a failure sooner: within the half of a ttl that is left, an
        owner that can write does so.
        """
        return [
            lease
            for lease, sighting in self._sightings.items()
            if sighting.alive and sighting.unseen > sighting.row.ttl / 2
        ]

    def judge(self) -> None:
        """End the leases whose owners were silent for longer than their ttl."""
        for sighting in self._sightings.values():
            if sighting.unseen > sighting.row.ttl:
                sighting.alive = False

    def forgive(self) -> None:
        """Give live leases their whole ttl again: no owner could renew, for a reason that is not the owners' fault."""
        for sighting in self._sightings.values():
            if sighting.alive:
                sighting.unseen = 0.0

    def _is_fresh(self, row: LeaseRow) -> bool:
        return self._wall() - row.renewed <= row.ttl
