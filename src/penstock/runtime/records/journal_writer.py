"""A machine's journal on disk: segments, buffered, bounded, dropped when old, that never hold the machine up.

journal/<router>/000000, 000001, ...: a segment that is full is followed by a new one, which begins with a snapshot.
"""

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.kernel.journal_frames import MachineBook, frame
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.runtime.records.segments import SEGMENTS

log = logging.getLogger("penstock.journal")

SEGMENT_BYTES = 32 << 20
"""Size of a full segment; `SEGMENTS` of them are 128 MiB for each router.

Each begins with all that the router knows, so that smaller ones would hold it up more often.
"""
SNAPSHOT_MAX = 0.1
"""Seconds; where a router's snapshot takes longer, no further segment is begun: routing goes first."""
ROUTERS = 16
"""Journals kept of one run: each restarted frontend has one of its own."""
RETRY = 60.0
"""Seconds after a failed write until a new segment is tried."""


class JournalWriter:
    """Write every event of a machine to disk; `watch` only holds it, `flush` does the I/O and never raises.

    Events and effects are frozen, so they may be encoded later than they happened. A failed write loses the segment's
    rest: later events would not replay. The next flush that succeeds begins a new segment.

    Args:
        folder: made where absent; segments that are there already are an older process's, and stay.
        wall_ns: wall clock at time 0 of the run.
        segment_bytes: size at which a segment is full.
        segments: how many are kept, the one that is written included.
        batch: events that are held until they are encoded together; `encode` does it at any time.
    """

    def __init__(
        self,
        folder: Path,
        book: MachineBook,
        *,
        wall_ns: int,
        segment_bytes: int = SEGMENT_BYTES,
        segments: int = SEGMENTS,
        batch: int = 1,
    ) -> None:
        self.folder = folder
        self.lost = 0
        """Records that could not be written."""
        self.failing: str | None = None
        self.ended: str | None = None
        """Why it was given up; None while it is written."""
        self.longest_snapshot = 0.0
        """Longest time, in seconds, that a snapshot blocked the machine."""
        self._book = book
        self._wall_ns = wall_ns
        self._segment_bytes = segment_bytes
        self._segments = segments
        self._batch = batch
        self._unencoded: list[tuple[Nanos, Event, Sequence[Effect]]] = []
        self._sequence = 0
        """Number of the next event to be encoded."""
        self._number = -1
        self._size = 0
        self._buffer: list[tuple[int, bytes]] = []
        """(segment, frame)"""
        self._begun = False
        self._broken = False
        self._retry = 0.0
        self._lock = threading.Lock()

    def watch(self, now: Nanos, name: str, event: Event, effects: Sequence[Effect]) -> None:
        """Take an event and its effects; call it after each event, in order."""
        if not self._begun:
            return
        self._unencoded.append((now, event, effects))
        if len(self._unencoded) >= self._batch:
            self.encode()

    def encode(self) -> None:
        """Encode what is held. Call it between two events: it may begin a segment, with a snapshot of the machine."""
        events, self._unencoded = self._unencoded, []
        if not events:
            return
        now = events[-1][0]
        if self._broken:
            self.lost += len(events)
            if time.monotonic() >= self._retry:
                self.begin(now)  # its snapshot includes these events
            return
        frames = [
            (self._number, frame(self._book.record(sequence, *event)))
            for sequence, event in enumerate(events, self._sequence)
        ]
        self._sequence += len(frames)
        self._size += sum(len(data) for _, data in frames)
        with self._lock:
            self._buffer += frames
        if self._size >= self._segment_bytes:
            seconds = max(self.longest_snapshot, self._book.seconds())
            if seconds > SNAPSHOT_MAX:
                self._begun = False
                self.ended = (
                    f"writing down the router would hold it up for {seconds:.2g} s; what came before record "
                    f"{self._sequence} can be replayed"
                )
                log.warning("the journal %s ends: %s", self.folder, self.ended)
            else:
                self.begin(now)

    def begin(self, now: Nanos) -> None:
        """Begin a segment with a snapshot of the machine. Call it once before the first event; others follow."""
        started = time.thread_time()
        data = frame(self._book.header(sequence=self._sequence, now=now, wall_ns=self._wall_ns))
        self.longest_snapshot = max(self.longest_snapshot, time.thread_time() - started)
        with self._lock:
            self._number += 1
            self._size = 0
            self._broken = False
            self._begun = True
            self._buffer.append((self._number, data))

    def flush(self) -> None:
        """Write what is buffered; may run in a thread of its own."""
        with self._lock:
            frames, self._buffer = self._buffer, []
        if not frames:
            return
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                _forget_older(self.folder)
            for number in sorted({number for number, _ in frames}):
                mine = b"".join([data for one, data in frames if one == number])
                with (self.folder / f"{number:06d}").open("ab") as file:
                    file.write(mine)
                (self.folder / f"{number - self._segments:06d}").unlink(missing_ok=True)
        except OSError as error:
            if self.failing is None:
                log.warning("the journal %s can't be written: %s", self.folder, error)
            self.failing = str(error)
            self.lost += len(frames)
            with self._lock:
                self.lost += len(self._buffer)
                self._buffer = []
                self._broken = True  # the next records would not follow those on disk
                self._retry = time.monotonic() + RETRY
            return
        if self.failing is not None:
            log.warning("the journal %s can be written again, in a new segment", self.folder)
            self.failing = None


def _forget_older(folder: Path) -> None:
    """Remove the journals beside this one that were written to the longest ago, beyond `ROUTERS`."""
    others = sorted(
        (other for other in folder.parent.iterdir() if other != folder and other.is_dir()),
        key=lambda other: max((file.stat().st_mtime_ns for file in other.iterdir()), default=0),
    )
    for other in others[: max(0, len(others) + 1 - ROUTERS)]:
        shutil.rmtree(other)
