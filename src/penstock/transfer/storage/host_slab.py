"""`HostSlab`: blocks in one slab of this host's memory, which other processes may map, with a checksum beside each.

Every read copies, and then computes the checksum of the copy: the reader has what was written, or a miss. The slab is
file-backed memory without a name (``memfd``), or a file below ``/dev/shm`` where it has to have one. It does not
survive a restart.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import ConfigError
from penstock.transfer.storage.block_store import BlockIo, BlockResult, StoredRecord
from penstock.transfer.storage.io_threads import IoThreads, ThreadCall
from penstock.transfer.storage.record_header import RecordHeader, check_record, misfit
from penstock.transfer.storage.slab_file import whole_sectors

log = logging.getLogger(__name__)

THREADS = 2
"""Copies run beside the event loop; measured: more threads do not copy faster than memory allows."""


class HostSlab:
    """A `BlockStore` in memory. `put` and `get` do the same at once, for a caller that may block.

    Args:
        block_bytes: of a payload; slots begin at pages.
        slots: how many.
        path: of a file below /dev/shm, for others to map; None has no name, and others map `fd`.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(self, block_bytes: int, slots: int, *, path: Path | None = None) -> None:
        self.block_bytes = block_bytes
        self.slots = slots
        self.stride = whole_sectors(block_bytes)
        """Bytes from one slot to the next, from offset 0 of the file on."""
        self.path = path
        size = slots * self.stride
        if path is None:
            self.fd = os.memfd_create("penstock-host-slab", os.MFD_CLOEXEC)
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._reserve(size)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            if path is not None:
                path.unlink()
            raise
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        self._headers: list[RecordHeader | None] = [None] * slots
        self._threads = IoThreads("penstock-host", THREADS)

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory, shape (block_bytes,), page-aligned."""
        return self._view[slot * self.stride : slot * self.stride + self.block_bytes]

    def checksum(self, slot: int) -> int | None:
        """Return the XXH3-64 of what was written to a slot; None where it has no block."""
        header = self._headers[slot]
        return None if header is None else header.checksum

    def put(self, block: BlockIo) -> BlockResult:
        """Copy a block in, and keep its checksum: the given one, or that of the bytes in the slab."""
        if cause := misfit(block, self.slots, self.block_bytes):
            return BlockResult("failed", cause)
        self._headers[block.slot] = None
        begin = block.slot * self.stride
        self._array[begin : begin + self.block_bytes] = np.frombuffer(block.buffer, np.uint8)
        return self.adopt(block)

    def adopt(self, block: BlockIo) -> BlockResult:
        """Take what already lies in a slot, read from elsewhere into `view`, as a block; its buffer is not used."""
        checksum = xxh3_64_intdigest(self.view(block.slot)) if block.checksum is None else block.checksum
        self._headers[block.slot] = RecordHeader(
            block.slot, block.key, block.parent, self.block_bytes, block.generation, 0, checksum
        )
        return BlockResult("ok", checksum=checksum)

    def get(self, block: BlockIo) -> BlockResult:
        """Copy a block out, and check the copy."""
        if cause := misfit(block, self.slots, self.block_bytes):
            return BlockResult("failed", cause)
        header = self._headers[block.slot]
        if header is None:
            return BlockResult("absent")
        begin = block.slot * self.stride
        np.frombuffer(block.buffer, np.uint8)[:] = self._array[begin : begin + self.block_bytes]
        return check_record(header, block, block.buffer)

    async def write(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        calls = [
            ThreadCall(each.slot % THREADS, each.slot, partial(self.put, each), partial(self._erase, each.slot))
            for each in blocks
        ]
        return await self._threads.run(calls, deadline)

    async def read(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        calls = [ThreadCall(each.slot % THREADS, each.slot, partial(self.get, each)) for each in blocks]
        return await self._threads.run(calls, deadline)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget at once, and once more behind the writes that are queued."""
        for slot in slots:
            self._erase(slot)
            self._threads.later(slot % THREADS, partial(self._erase, slot))

    def records(self) -> list[StoredRecord]:
        return []

    def busy(self) -> frozenset[int]:
        return self._threads.busy()

    async def close(self) -> None:
        """Stop; the memory goes when nobody has a view of it any more."""
        await self._threads.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _erase(self, slot: int) -> None:
        self._headers[slot] = None

    def _reserve(self, size: int) -> None:
        """Get all pages now: memory that is not there is an error here, and no SIGBUS during a copy later."""
        try:
            os.ftruncate(self.fd, size)
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise ConfigError(
                f"host tier: there is no shared memory of {size:,} bytes: {error.strerror}",
                hint="make the host tier smaller, or the container's /dev/shm larger",
            ) from error
