"""`SharedMemory`: bytes that several processes of one host map, as a memfd or a file of /dev/shm."""

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from penstock_kv.transfer.descriptors import ByteArray


class SharedMemory:
    """Mapped bytes; the memory lives as long as a process maps it, a named file until it is unlinked.

    A file must not be truncated while it is mapped: the kernel ends a process that touches what is gone.

    Args:
        fileno: open file, owned by this object.
        path: where other processes open it; a memfd's leads through /proc.
        mapped: the mapping, where there is one already.
    """

    def __init__(self, fileno: int, path: str, mapped: mmap.mmap | None = None) -> None:
        self.fileno = fileno
        self.path = path
        self._map = mmap.mmap(fileno, 0) if mapped is None else mapped
        self.array: ByteArray = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, size: int, name: str = "penstock") -> "SharedMemory":
        """Make an anonymous one that goes with its processes: nothing to clean up after a kill."""
        fileno = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fileno, size)
        fcntl.fcntl(fileno, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # a shrunk file would kill who copies from it
        return cls(fileno, f"/proc/{os.getpid()}/fd/{fileno}")

    @classmethod
    def open(cls, path: Path | str) -> "SharedMemory":
        """Map a file that exists, such as one of /dev/shm."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), str(path))

    def close(self) -> None:
        """Close the file; the mapping itself goes with the last array that shows it."""
        if self.fileno >= 0:
            os.close(self.fileno)
            self.fileno = -1
