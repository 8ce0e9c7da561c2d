"""`RegionTable`: the memory that a TCP server reads and writes for its peers, with bounds and a safe way out."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.kernel.errors import InvariantError
from penstock.transfer.tcp.tcp_frames import MoveOutcome, RegionSpan
from penstock.transfer.tcp.tcp_stream import TcpStream

LEAVE_SECONDS = 5.0
"""A closed connection lets go of a region within microseconds; longer is a bug."""


@dataclass(slots=True, eq=False)
class ServedRegion:
    """Memory that peers may read, and write where it is ``writable``. ``users``: streams with a call on it."""

    memory: memoryview
    writable: bool
    users: list[TcpStream] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RegionUse:
    """Part of a region, for one call of one stream."""

    id: int
    region: ServedRegion
    view: memoryview


class RegionTable:
    """Regions by id. Calls come from the threads of the server's connections and from the owner's."""

    def __init__(self) -> None:
        self._regions: dict[int, ServedRegion] = {}
        self._changed = threading.Condition()

    def add(self, region: int, memory: memoryview, *, writable: bool) -> None:
        """Serve a region: contiguous bytes."""
        with self._changed:
            self._regions[region] = ServedRegion(memory.cast("B"), writable)

    def remove(self, region: int) -> None:
        """Serve a region no more. Connections in a call on it are closed; afterwards nothing touches its memory.

        Raises:
            InvariantError: a thread does not let go of it.
        """
        with self._changed:
            gone = self._regions.pop(region, None)
            if gone is None:
                return
            for stream in gone.users:
                stream.close()
            end = time.monotonic() + LEAVE_SECONDS
            while gone.users:
                if not self._changed.wait(end - time.monotonic()):
                    raise InvariantError(f"a connection still touches region {region} after it was closed")
        gone.memory.release()

    def use(self, spans: Sequence[RegionSpan], user: TcpStream, *, write: bool) -> list[RegionUse | MoveOutcome]:
        """Lend the memory of spans for one call, or say why not; `leave` must follow with what is lent."""
        with self._changed:
            return [self._use(span, user, write) for span in spans]

    def _use(self, span: RegionSpan, user: TcpStream, write: bool) -> RegionUse | MoveOutcome:
        region = self._regions.get(span.region)
        if region is None:
            return "absent"
        end = span.offset + span.length
        if not 0 <= span.offset < end <= len(region.memory) or (write and not region.writable):
            return "denied"
        region.users.append(user)
        return RegionUse(span.region, region, region.memory[span.offset : end])

    def leave(self, uses: Sequence[RegionUse], user: TcpStream) -> list[bool]:
        """End a call; return whether each region was served until now, and so whether what was moved counts."""
        for use in uses:
            use.view.release()
        with self._changed:
            for use in uses:
                use.region.users.remove(user)
            self._changed.notify_all()
            return [self._regions.get(use.id) is use.region for use in uses]
