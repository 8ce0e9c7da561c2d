"""A slab file: one preallocated file of a disk tier, with direct I/O, a lock, and a first sector that describes it.

    sector 0: 8s magic | u32 version | u32 position | u32 files | u64 block_bytes | u64 epoch | u64 first epoch
              | u64 XXH3-64 of these
    then, per block: a sector with its record header, and its payload padded to whole sectors

The epoch grows with each opening and is on the disk before anything else is written, so no stamp is given twice.
Records of epochs before the first one are void: a clear raises it, so that nothing written before comes back.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import ConfigError, write_hint
from penstock_kv.transfer.storage.record_header import SECTOR

log = logging.getLogger(__name__)

SLAB_NAME = "penstock-blocks.slab"

_MAGIC = b"PSKSLAB\n"
_VERSION = 2
_FIRST = struct.Struct("<8sIIIQQQ")
_SUM = struct.Struct("<Q")


def aligned(size: int) -> memoryview:
    """Return zeroed memory that begins at a page, as direct I/O needs it."""
    return memoryview(mmap.mmap(-1, max(size, SECTOR)))[:size]


def whole_sectors(size: int) -> int:
    """Return a size rounded up to whole sectors."""
    return -(-size // SECTOR) * SECTOR


class FileCalls:
    """The system calls of a disk tier: what a fault layer of tests stands in for."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write buffers one after the other; returns bytes, maybe fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers one after the other; returns bytes, maybe fewer than wanted."""
        return os.preadv(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Give the file its place on the disk."""
        os.posix_fallocate(fd, offset, length)


class SlabFile:
    """One open slab file.

    ``epoch``: of the opening before; 0 is a new file, without records. ``first_epoch``: the oldest that counts.

    Args:
        folder: made where it is absent.
        position, files: which of how many slab files this is; a file of another set is emptied.
        block_bytes: of a payload.
        blocks: how many it has place for.

    Raises:
        ConfigError: the folder can't be written, another process has the file, or the disk has no place for it.
    """

    def __init__(
        self, folder: Path, *, position: int, files: int, block_bytes: int, blocks: int, calls: FileCalls
    ) -> None:
        self.path = folder / SLAB_NAME
        self.stride = SECTOR + whole_sectors(block_bytes)
        """Bytes from one record to the next."""
        self.fd = -1
        self._calls = calls
        self._open(folder)
        try:
            self._lock()
            self._shape = (position, files, block_bytes)
            self.epoch, self.first_epoch = self._read_epochs()
            if not self.epoch:
                os.ftruncate(self.fd, 0)
            self._reserve(SECTOR + blocks * self.stride)
        except BaseException:
            self.close()
            raise

    def begin(self, epoch: int) -> None:
        """Write the first sector: what is written from now on has this epoch.

        Raises:
            ConfigError: the disk refuses it.
        """
        body = _FIRST.pack(_MAGIC, _VERSION, *self._shape, epoch, self.first_epoch)
        first = aligned(SECTOR)
        first[: _FIRST.size + _SUM.size] = body + _SUM.pack(xxh3_64_intdigest(body))
        try:
            if self._calls.pwritev(self.fd, [first], 0) != SECTOR:
                raise OSError(errno.EIO, "short write")
            os.fdatasync(self.fd)
        except OSError as error:
            raise ConfigError(f"disk tier: {self.path} can't be written: {error.strerror}") from error

    def offset(self, index: int) -> int:
        """Return where a record begins, bytes."""
        return SECTOR + index * self.stride

    def write(self, buffers: Sequence[memoryview | bytes], index: int) -> None:
        """Write a record or the beginning of one, in one system call.

        Raises:
            OSError: as the kernel says, or a short write.
        """
        wanted = sum(map(len, buffers))
        written = self._calls.pwritev(self.fd, buffers, self.offset(index))
        if written != wanted:
            raise OSError(errno.EIO, f"short write to {self.path}: {written} of {wanted} bytes")

    def read(self, buffers: Sequence[memoryview], index: int) -> None:
        """Read a record or the beginning of one, in one system call.

        Raises:
            OSError: as the kernel says, or a short read.
        """
        wanted = sum(map(len, buffers))
        read = self._calls.preadv(self.fd, buffers, self.offset(index))
        if read != wanted:
            raise OSError(errno.EIO, f"short read from {self.path}: {read} of {wanted} bytes")

    def close(self) -> None:
        """Close the file, which releases its lock; a second time does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _open(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
                self.direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.fd = os.open(self.path, flags, 0o600)
                self.direct = False
        except OSError as error:
            raise ConfigError(
                f"disk tier: {folder} can't be used: {error.strerror}",
                hint=write_hint(error, "name another folder on a local disk"),
            ) from error
        if not self.direct:
            log.warning(
                "disk tier: %s has no direct I/O; blocks go through the page cache and take memory twice", folder
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"disk tier: another process uses {self.path}", hint="give each engine folders of its own"
            ) from error

    def _read_epochs(self) -> tuple[int, int]:
        """Return the epoch of the last opening and the first one; 0 where there is nothing that these files can use."""
        first = aligned(SECTOR)
        if self._calls.preadv(self.fd, [first], 0) < SECTOR:
            return 0, 0
        body = bytes(first[: _FIRST.size])
        magic, version, *shape, epoch, first_epoch = _FIRST.unpack(body)
        if _SUM.unpack_from(first, _FIRST.size)[0] != xxh3_64_intdigest(body) or (magic, version) != (_MAGIC, _VERSION):
            log.warning("disk tier: %s begins with a broken sector; it is emptied", self.path)
            return 0, 0
        if tuple(shape) != self._shape:
            position, files, block_bytes = self._shape
            log.warning(
                "disk tier: %s is file %d of %d with blocks of %d bytes, not %d of %d with %d bytes; it is emptied",
                *(self.path, shape[0] + 1, *shape[1:], position + 1, files, block_bytes),
            )
            return 0, 0
        return int(epoch), int(first_epoch)

    def _reserve(self, size: int) -> None:
        """Give the file its size and its place, so that a full disk is an error now and no failed write later."""
        before = os.fstat(self.fd).st_size
        try:
            os.ftruncate(self.fd, size)
            self._calls.fallocate(self.fd, 0, size)
        except OSError as error:
            os.ftruncate(self.fd, min(before, size))
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise ConfigError(f"disk tier: {self.path} can't get {size:,} bytes: {error.strerror}") from error
            disk, own = os.fstatvfs(self.fd), os.fstat(self.fd).st_blocks * 512
            fits = max(0, (disk.f_bavail * disk.f_frsize + own - SECTOR) // self.stride)
            raise ConfigError(
                f"disk tier: {self.path.parent} has no place for {size:,} bytes: {fits:,} blocks fit, "
                f"{fits * self.stride:,} bytes",
                hint="make the disk tier smaller, or name another folder",
            ) from error
