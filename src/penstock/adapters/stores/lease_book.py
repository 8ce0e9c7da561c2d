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
        self._seen: dict[str, _LeaseSighting] = {}
        self._looked: float | None = None
        self._bad: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        """Read the renewals since the last call. Raises OSError where the directory can't be read."""
        now = self._monotonic()
        elapsed = 0.0 if self._looked is None else now - self._looked
        found: set[str] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(LEASE_SUFFIX):
                    name = entry.name[: -len(LEASE_SUFFIX)]
                    try:
                        self._renewals(name, entry, elapsed)
                    except FileNotFoundError:
                        continue  # its owner left between the listing and the read
                    found.add(name)
        for name in self._seen.keys() - found:
            del self._seen[name]
        self._looked = now

    def is_alive(self, name: str) -> bool:
        """Return whether a lease was alive at the last `judge`."""
        seen = self._seen.get(name)
        return seen is not None and seen.alive

    def has_silent(self) -> bool:
        """Return whether `judge` would now end a lease that is alive so far."""
        return any(seen.alive and seen.unseen > seen.lease.ttl for seen in self._seen.values())

    def judge(self) -> None:
        """End the leases whose owners were silent for longer than their ttl."""
        for seen in self._seen.values():
            if seen.unseen > seen.lease.ttl:
                seen.alive = False

    def forgive(self) -> None:
        """Give live leases their whole ttl again: no owner could renew, for a reason that is not the owners' fault."""
        for seen in self._seen.values():
            if seen.alive:
                seen.unseen = 0.0

    def _renewals(self, name: str, entry: "os.DirEntry[str]", elapsed: float) -> None:
        stat = entry.stat()
        stamp = (stat.st_ino, stat.st_mtime_ns)
        seen = self._seen.get(name)
        if seen is not None:
            if seen.stamp == stamp:
                # A late call of `look` (this process was suspended) must not by itself make every owner late.
                seen.unseen += min(elapsed, seen.lease.ttl / 3)
            else:
                seen.stamp, seen.unseen, seen.alive = stamp, 0.0, True
            return
        if self._bad.get(name) == stamp:
            return
        lease = decode_lease(Path(entry.path).read_bytes())
        if lease is None:
            self.malformed += 1
            self._bad[name] = stamp
            return
        fresh = self._wall() - stat.st_mtime <= lease.ttl
        self._seen[name] = _LeaseSighting(lease, stamp, unseen=0.0, alive=fresh)
        self.longest_ttl = max(self.longest_ttl, lease.ttl)
