"""`RegionTable`: the memory that a TCP server reads and writes for its peers, with bounds and a safe way out."""

import threading
import time
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


@dataclass(slots=True, frozen=True, eq=False)
class RegionUse:
    """Part of a region, for one call of one stream."""

    id: int
    region: ServedRegion
    view: memoryview
    user: TcpStream


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

    def use(self, span: RegionSpan, user: TcpStream, *, write: bool) -> RegionUse | MoveOutcome:
        """Lend the memory of a span for one call, or say why not; `leave` must follow where it is lent."""
        with self._changed:
            region = self._regions.get(span.region)
            if region is None:
                return "absent"
            inside = span.offset >= 0 and 0 < span.length <= len(region.memory) - span.offset
            if not inside or (write and not region.writable):
                return "denied"
            region.users.append(user)
            return RegionUse(span.region, region, region.memory[span.offset : span.offset + span.length], user)

    def leave(self, use: RegionUse) -> bool:
        """End a call; return whether the region was served until now, and so whether what was moved counts."""
        use.view.release()
        with self._changed:
            use.region.users.remove(use.user)
            self._changed.notify_all()
            return self._regions.get(use.id) is use.region
