"""`StagingRegion`: rows of shared memory through which KV blocks go between an engine and its tier process."""

import fcntl
import logging
import mmap
import os
import time
from pathlib import Path

log = logging.getLogger("vllm.penstock")

SHARED = Path("/dev/shm")
PAGE = 4096
YOUNG = 300.0
"""Seconds: a region younger than that may belong to an engine that has not locked it yet."""


class StagingRegion:
    """A mapped region.

    Args:
        path: below /dev/shm.
        create: make it, and hold it for as long as this process lives; others only map it.
    Raises:
        OSError: there is not enough shared memory, or no such region.
    """

    def __init__(self, path: Path, rows: int, row_bytes: int, *, create: bool = False) -> None:
        self.path, self.rows, self.row_bytes = path, rows, row_bytes
        self._lock = lock_region(path, rows * row_bytes) if create else -1
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(file, rows * row_bytes)
        finally:
            os.close(file)
        self.memory = memoryview(self._map)
        """All rows."""

    def row(self, number: int) -> memoryview:
        """Return the memory of a row."""
        return self.memory[number * self.row_bytes : (number + 1) * self.row_bytes]

    def close(self) -> None:
        """Let it go; who made it removes it. Memory that is in use stays until it is not."""
        if self._lock >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def lock_region(path: Path, size: int = 0) -> int:
    """Lock a region for as long as this process lives; return the file. ``size``: make it, with so many bytes.

    Raises:
        OSError: there is not enough shared memory, or no such region.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if size else 0), 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        if size:
            os.posix_fallocate(file, 0, size)  # else a full /dev/shm would kill the process at some later write
    except OSError:
        os.close(file)
        if size:
            path.unlink(missing_ok=True)
        raise
    return file


def remove_leftovers(pattern: str) -> None:
    """Remove regions below /dev/shm whose engines are gone: nobody locks them."""
    for path in SHARED.glob(pattern):
        try:
            if time.time() - path.stat().st_mtime < YOUNG:
                continue
            with path.open("rb") as region:
                fcntl.flock(region, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except BlockingIOError:
            continue
        except OSError as error:
            log.warning("the left-over region %s can't be removed: %s", path, error)
            continue
        log.info("removed %s, whose engine is gone", path)
