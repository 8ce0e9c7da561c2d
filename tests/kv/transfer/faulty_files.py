"""`FaultyFiles`: the system calls of a disk tier with faults to order, for tests of what stands on it."""

import errno
import os
import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock_kv.transfer.storage.record_header import SECTOR
from penstock_kv.transfer.storage.slab_file import FileCalls, aligned

FileFaultKind = Literal["error", "short", "flip", "hang"]
FaultyCall = Literal["read", "write", "any"]


class FileFault(NamedTuple):
    """One fault.

    Args:
        kind: ``error`` raises ``errno``; ``short`` transfers half of the bytes; ``flip`` changes one bit of the bytes
            (a read's as they come, a write's on their way); ``hang`` waits for `FaultyFiles.release`.
        target: calls that it hits.
        times: how many of them; None is all.
        skip: how many go well before.
        errno: EIO, ENOSPC, ...
        at: byte of the call's bytes that a flip hits, from the header's first on.
    """

    kind: FileFaultKind
    target: FaultyCall = "any"
    times: int | None = None
    skip: int = 0
    errno: int = errno.EIO
    at: int = 0


class FaultyFiles(FileCalls):
    """Carries out system calls with faults. ``patience``: seconds after which a hanging call goes on by itself.

    Safe from all threads. `faults_met` counts calls that had a fault.
    """

    def __init__(self, patience: float = 10.0) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._fault: FileFault | None = None
        self._left: int | None = None
        self._skip = 0
        self._released = threading.Event()
        self.faults_met = 0
        self.hanging = 0
        """Calls that hang now."""

    def inject(self, fault: FileFault | None) -> None:
        """Order a fault; None ends the last one. Calls that hang go on hanging."""
        with self._lock:
            self._fault = fault
            if fault is not None:
                self._left, self._skip = fault.times, fault.skip
            if fault is not None and fault.kind == "hang":
                self._released = threading.Event()

    def release(self) -> None:
        """Let calls that hang go on, and order no more of them."""
        self.inject(None)
        self._released.set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        fault = self._meet("write")
        if fault is not None and fault.kind in ("short", "flip"):
            raw = aligned(sum(map(len, buffers)))  # direct I/O takes no other memory
            raw[:] = b"".join(buffers)
            if fault.kind == "short":
                raw = raw[: len(raw) // 2 // SECTOR * SECTOR]
            else:
                raw[fault.at % len(raw)] ^= 1
            return super().pwritev(fd, [raw], offset)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._meet("read")
        count = super().preadv(fd, buffers, offset)
        if fault is not None and fault.kind == "short":
            return count // 2
        if fault is not None and fault.kind == "flip" and count:
            at = fault.at % count
            for buffer in buffers:
                if at < len(buffer):
                    buffer[at] ^= 1
                    break
                at -= len(buffer)
        return count

    def _meet(self, target: FaultyCall) -> FileFault | None:
        """Return the fault of this call, once an error is raised or a hang is over."""
        with self._lock:
            fault = self._fault
            if fault is None or self._left == 0 or fault.target not in (target, "any"):
                return None
            if self._skip:
                self._skip -= 1
                return None
            if self._left is not None:
                self._left -= 1
            self.faults_met += 1
            released = self._released
        if fault.kind == "error":
            raise OSError(fault.errno, os.strerror(fault.errno))
        if fault.kind == "hang":
            with self._lock:
                self.hanging += 1
            released.wait(self._patience)
            with self._lock:
                self.hanging -= 1
        return fault
