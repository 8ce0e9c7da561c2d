"""Lease book: which leases of a file store are alive, as one process observes their renewals.

A lease is renewed by touching its file. It ends when *this process observes* no renewal for ``ttl`` seconds of its
monotonic clock, so a step of the wall clock drops no owner. The wall clock decides only about a lease that is new to
this process: one that was last touched longer ago than its ttl was left by a process that is gone.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.adapters.stores.file_layout import LEASE_SUFFIX, FileLease, decode_lease


@dataclass(slots=True)
class _LeaseSighting:
    lease: FileLease
    stamp: tuple[int, int]
    unseen: float
    alive: bool


class LeaseBook:
    """What this process knows of all leases under one directory.

    Args:
        folder: the directory of lease files.
        monotonic, wall: clocks, seconds.
    """

    def __init__(
        self,
        folder: Path,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.malformed = 0
        """Lease files that could not be read."""
        self.longest_ttl = 0.0
        """The longest ttl of all leases so far; seconds."""
        self._folder = folder
        self._monotonic = monotonic
        self._wall = wall
        self._sightings: dict[str, _LeaseSighting] = {}
        self._looked: float | None = None
        self._bad: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        """Read the renewals since the last call. Raises OSError where the directory can't be read."""
        now = self._monotonic()
        elapsed = 0.0 if self._looked is None else now - self._looked
        names: set[str] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(LEASE_SUFFIX):
                    name = entry.name[: -len(LEASE_SUFFIX)]
                    try:
                        self._renewals(name, entry, elapsed)
                    except FileNotFoundError:
                        continue  # its owner left between the listing and the read
                    names.add(name)
        for name in self._sightings.keys() - names:
            del self._sightings[name]
        self._looked = now

    def is_alive(self, name: str) -> bool:
        """Return whether a lease was alive at the last `judge`."""
        sighting = self._sightings.get(name)
        return sighting is not None and sighting.alive

    def has_silent(self) -> bool:
        """Return whether `judge` would now end a lease that is alive so far."""
        return any(sighting.alive and sighting.unseen > sighting.lease.ttl for sighting in self._sightings.values())

    def judge(self) -> None:
        """End the leases whose owners were silent for longer than their ttl."""
        for sighting in self._sightings.values():
            if sighting.unseen > sighting.lease.ttl:
                sighting.alive = False

    def forgive(self) -> None:
        """Give live leases their whole ttl again: no owner could renew, for a reason that is not the owners' fault."""
        for sighting in self._sightings.values():
            if sighting.alive:
                sighting.unseen = 0.0

    def _renewals(self, name: str, entry: "os.DirEntry[str]", elapsed: float) -> None:
        stat = entry.stat()
        stamp = (stat.st_ino, stat.st_mtime_ns)
        sighting = self._sightings.get(name)
        if sighting is not None:
            if sighting.stamp == stamp:
                # A late call of `look` (this process was suspended) must not by itself make every owner late.
                sighting.unseen += min(elapsed, sighting.lease.ttl / 3)
            else:
                sighting.stamp, sighting.unseen, sighting.alive = stamp, 0.0, True
            return
        if self._bad.get(name) == stamp:
            return
        lease = decode_lease(Path(entry.path).read_bytes())
        if lease is None:
            self.malformed += 1
            self._bad[name] = stamp
            return
        fresh = self._wall() - stat.st_mtime <= lease.ttl
        self._sightings[name] = _LeaseSighting(lease, stamp, unseen=0.0, alive=fresh)
        self.longest_ttl = max(self.longest_ttl, lease.ttl)
