"""`HostSlab`: blocks in one slab of this host's memory, which other processes may map, with a checksum beside each.

Every read copies, and then computes the checksum of the copy: the reader has what was written, or a miss. The slab is
memory without a name (``memfd``), which does not survive a restart.
"""

import logging
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult, StoredRecord
from penstock_kv.transfer.storage.io_threads import IoThreads, ThreadCall
from penstock_kv.transfer.storage.record_header import RecordHeader, check_record, misfit
from penstock_kv.transfer.storage.slab_file import whole_sectors

log = logging.getLogger(__name__)

THREADS = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
"""Copies run beside the event loop. One core copies and sums some 5 GB/s, a server's memory carries many times that,
and a GPU takes 50. More than eight would wait for each other's Python."""


PIECE = 256 << 10
"""Bytes that are copied before their checksum is computed: they fit in a core's second-level cache."""


class HostSlab:
    """A `BlockStore` in memory. `put` and `get` do the same at once, for a caller that may block.

    Args:
        block_bytes: of a payload; slots begin at pages.
        slots: how many.

    Raises:
        ConfigError: there is not so much memory.
    """

    def __init__(self, block_bytes: int, slots: int) -> None:
        self.block_bytes = block_bytes
        self.slots = slots
        self.stride = whole_sectors(block_bytes)
        """Bytes from one slot to the next, from offset 0 of the file on."""
        size = slots * self.stride
        _check_memory(size)
        self.fd = os.memfd_create("penstock-host-slab", os.MFD_CLOEXEC)
        try:
            # All pages now: memory that is not there is an error here, and no SIGBUS during a copy later.
            os.posix_fallocate(self.fd, 0, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(
                f"host tier: there is no shared memory of {size:,} bytes: {error.strerror}",
                hint="make the host tier smaller, or the container's /dev/shm larger",
            ) from error
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.info("host tier: no huge pages: %s", error.strerror)
        self._view = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        self._headers: list[RecordHeader | None] = [None] * slots
        self._forgets = Counter[int]()
        """Per slot, how often it was forgotten."""
        self._threads = IoThreads("penstock-host", THREADS)

    def shared(self) -> SharedMemory:
        """Return the slab as memory that others map; it goes with this object."""
        return SharedMemory(self.fd, f"/proc/{os.getpid()}/fd/{self.fd}", self._map)

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
        target, source = self._array[begin : begin + self.block_bytes], np.frombuffer(block.buffer, np.uint8)
        if block.checksum is None:
            return self.adopt(block._replace(checksum=_copy_and_sum(target, source)))
        target[:] = source
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
        checksum = _copy_and_sum(np.frombuffer(block.buffer, np.uint8), self._array[begin : begin + self.block_bytes])
        return check_record(header, block, block.buffer, checksum=checksum)

    async def write(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        calls = [
            ThreadCall(
                each.slot % THREADS,
                each.slot,
                partial(self._put_unless_forgotten, each, self._forgets.get(each.slot, 0)),
                partial(self._erase, each.slot),
            )
            for each in blocks
        ]
        return await self._threads.run(calls, deadline)

    async def read(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        calls = [ThreadCall(each.slot % THREADS, each.slot, partial(self.get, each)) for each in blocks]
        return await self._threads.run(calls, deadline)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget at once; a write that was queued before fails."""
        for slot in slots:
            self._forgets[slot] += 1
            self._erase(slot)

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

    def _put_unless_forgotten(self, block: BlockIo, forgets: int) -> BlockResult:
        result = self.put(block)
        if self._forgets.get(block.slot, 0) != forgets:
            self._erase(block.slot)
            return BlockResult("failed", "the slot was forgotten meanwhile")
        return result

    def _erase(self, slot: int) -> None:
        self._headers[slot] = None


def _copy_and_sum(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> int:
    """Copy bytes; returns the XXH3-64 of the copy, which is read while the processor's cache still has it."""
    if len(target) <= PIECE:
        target[:] = source
        return xxh3_64_intdigest(target.data)
    checksum = xxh3_64()
    for begin in range(0, len(target), PIECE):
        piece = target[begin : begin + PIECE]
        piece[:] = source[begin : begin + PIECE]
        checksum.update(piece.data)
    return checksum.intdigest()


def memory_limit() -> int:
    """Return how many bytes this process may hope for: what is available, or its container's limit if that is less."""
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    limit = int(available.split()[1]) * 1024
    try:
        return min(limit, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group of version 2, or "max"
        return limit


def _check_memory(size: int) -> None:
    """Refuse a slab that the kernel would grant and then kill this process for, or a neighbour.

    Raises:
        ConfigError: there is not so much memory.
    """
    limit = memory_limit()
    if size > limit:
        raise ConfigError(
            f"host tier: {size:,} bytes are more than the {limit:,} bytes of memory that are available",
            hint="make the host tier smaller, or the container's memory limit larger",
        )
