"""`DiskStore`: blocks in slab files, one per directory, with direct I/O and an index that survives a restart.

Slot s is record s // n of file s % n, so consecutive slots are spread over the n directories. A record is a header
sector and the payload, in one ``pwritev``.

**After a crash** at any moment a record is whole or a miss. The header has a checksum of its own and of the payload,
and both are checked before a read is ok, so it does not matter in which order the sectors of a write reach the disk:

- none of them: the record before is whole, and its key still names its bytes;
- the header and a part of the payload: the payload's checksum is wrong;
- a part of the payload and no header: the old header's checksum of the payload is wrong;
- a torn header: the header's checksum is wrong;
- all of them: the new record is whole.

So no write waits for the disk's cache (no fsync): after a power cut there are more misses and nothing else. What a
`forget` leaves after a kill before its tombstone is written is a whole record that its key names rightly. After `void`
there is no such rest: what was written or under way before has a stamp that no opening takes any more.
"""

import asyncio
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult, StoredRecord
from penstock_kv.transfer.storage.io_threads import IoThreads, ThreadCall
from penstock_kv.transfer.storage.record_header import (
    SECTOR,
    SIZE,
    RecordHeader,
    check_record,
    misfit,
    pack_header,
    parse_header,
)
from penstock_kv.transfer.storage.slab_file import FileCalls, SlabFile, aligned, log, whole_sectors

THREADS_PER_FILE = 4
"""Measured: one thread reaches a disk's write rate with blocks from 1 MiB up, four from 256 KiB up."""
SCAN_THREADS = 16
"""Of each file while headers are read: small reads need depth."""
_COUNTER_BITS = 40
"""Low bits of a stamp; the epoch is above them. 2**40 writes are 12 years of 3,000 in a second."""


class DiskStore:
    """A `BlockStore` in slab files.

    Args:
        folders: one per device.
        block_bytes: of a payload; with a multiple of `SECTOR` and page-aligned buffers, nothing is copied.
        slots: over all folders.
        calls: stands in for the system calls, in tests.

    Raises:
        ConfigError: a folder is unusable, is in use by another process, or is too small.
    Cost: opening reads the header of each slot; see `records`.
    """

    def __init__(
        self, folders: Sequence[Path], block_bytes: int, slots: int, *, calls: FileCalls | None = None
    ) -> None:
        if not folders:
            raise ConfigError("disk tier: no folder is named", hint="set disk_dirs")
        if slots < len(folders):
            raise ConfigError(
                f"disk tier: {slots} blocks of {block_bytes:,} bytes can't be spread over {len(folders)} folders",
                hint="make the disk tier larger, or name fewer folders",
            )
        self.block_bytes = block_bytes
        self.slots = slots
        self._files: list[SlabFile] = []
        self._stamps = array("Q", bytes(8 * slots))
        """Per slot, the stamp of its record; 0 is none. Each is read and written by its slot's thread only."""
        self._lock = Lock()
        try:
            for position, folder in enumerate(folders):
                share = len(range(position, slots, len(folders)))
                file = SlabFile(
                    folder,
                    position=position,
                    files=len(folders),
                    block_bytes=block_bytes,
                    blocks=share,
                    calls=calls or FileCalls(),
                )
                self._files.append(file)
            self._records = self._scan()
            epoch = max(file.epoch for file in self._files) + 1
            for file in self._files:
                file.begin(epoch)
        except BaseException:
            self._close_files()
            raise
        self._epoch = epoch
        self._next_stamp = epoch << _COUNTER_BITS
        threads = THREADS_PER_FILE * len(folders)
        self._scratch = [_Scratch(SECTOR + whole_sectors(block_bytes)) for _ in range(threads)]
        self._threads = IoThreads("penstock-disk", threads)

    async def write(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        return await self._threads.run(
            [
                ThreadCall(
                    self._thread(each.slot),
                    each.slot,
                    partial(self._write, each, self._stamp()),
                    partial(self._erase, each.slot),
                )
                for each in blocks
            ],
            deadline,
        )

    async def read(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        return await self._threads.run(
            [ThreadCall(self._thread(each.slot), each.slot, partial(self._read, each)) for each in blocks], deadline
        )

    def forget(self, slots: Sequence[int]) -> None:
        """Overwrite headers, each behind what its slot's thread has to do; `close` waits for that."""
        for slot in slots:
            self._threads.later(self._thread(slot), partial(self._erase, slot))

    async def void(self) -> None:
        """See to it that no record that was ordered until now is there at the next opening, whatever happens before.

        Raises:
            ConfigError: the disk refuses it.
        """
        with self._lock:
            self._epoch += 1
            epoch = self._epoch
            self._next_stamp = epoch << _COUNTER_BITS
        for file in self._files:
            file.first_epoch = epoch
            await asyncio.to_thread(file.begin, epoch)

    @property
    def erase_failures(self) -> int:
        """How many records could not be erased: they may come back after a restart, whole and right for their key."""
        return sum(scratch.erase_failures for scratch in self._scratch)

    def records(self) -> list[StoredRecord]:
        """Return the records with a whole header, those written first in front; payloads are checked when read.

        Cost: one read of 4 KiB per slot when the store is opened: 5 to 8 s per 100,000 records, on a busy virtual disk.
        """
        return self._records

    def busy(self) -> frozenset[int]:
        return self._threads.busy()

    async def close(self) -> None:
        await self._threads.close()
        if self._threads.hanging():  # what such a thread does next must not hit another file of the same number
            log.warning("disk tier: a system call hangs; its slab files stay open and locked until this process ends")
            return
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _thread(self, slot: int) -> int:
        files = len(self._files)
        return slot % files * THREADS_PER_FILE + slot // files % THREADS_PER_FILE

    def place(self, slot: int) -> tuple[SlabFile, int]:
        """Return a slot's file, and the number of its record there."""
        return self._files[slot % len(self._files)], slot // len(self._files)

    def _stamp(self) -> int:
        """Return the next stamp, when a write is ordered: one that `void` came after is void, too."""
        with self._lock:
            self._next_stamp += 1
            return self._next_stamp

    def _write(self, block: BlockIo, stamp: int) -> BlockResult:
        if cause := misfit(block, self.slots, self.block_bytes):
            return BlockResult("failed", cause)
        scratch = self._scratch[self._thread(block.slot)]
        file, index = self.place(block.slot)
        checksum = xxh3_64_intdigest(block.buffer) if block.checksum is None else block.checksum
        scratch.header[:SIZE] = pack_header(
            RecordHeader(block.slot, block.key, block.parent, self.block_bytes, block.generation, stamp, checksum)
        )
        payload = block.buffer
        if not _is_direct(payload):
            payload = scratch.payload
            payload[: self.block_bytes] = block.buffer
        self._stamps[block.slot] = 0
        try:
            file.write([scratch.header, payload], index)
        except OSError:
            self._erase(block.slot)
            raise
        self._stamps[block.slot] = stamp
        return BlockResult("ok", checksum=checksum)

    def _read(self, block: BlockIo) -> BlockResult:
        if cause := misfit(block, self.slots, self.block_bytes):
            return BlockResult("failed", cause)
        stamp = self._stamps[block.slot]
        if not stamp:
            return BlockResult("absent")
        scratch = self._scratch[self._thread(block.slot)]
        file, index = self.place(block.slot)
        direct = _is_direct(block.buffer)
        file.read([scratch.header, block.buffer if direct else scratch.payload], index)
        payload = block.buffer if direct else scratch.payload[: self.block_bytes]
        result = check_record(parse_header(scratch.header), block, payload, stamp)
        if result.outcome == "ok" and not direct:
            block.buffer[:] = payload
        return result

    def _erase(self, slot: int) -> None:
        """Make a slot empty, here and on the disk."""
        self._stamps[slot] = 0
        file, index = self.place(slot)
        try:
            file.write([_TOMBSTONE], index)
        except OSError as error:
            self._scratch[self._thread(slot)].erase_failures += 1
            log.warning("disk tier: the record of slot %d in %s could not be erased: %s", slot, file.path, error)

    def _scan(self) -> list[StoredRecord]:
        """Read all headers; a slot whose header is broken or can't be read is empty."""
        begin = time.monotonic()
        files = [number for number, file in enumerate(self._files) if file.epoch]
        if not files:
            return []
        step = len(self._files)
        shares = [
            range(number + step * part, self.slots, step * SCAN_THREADS)
            for number in files
            for part in range(SCAN_THREADS)
        ]
        with ThreadPoolExecutor(len(shares), "penstock-disk-scan") as pool:
            scans = list(pool.map(self._scan_slots, shares))
        headers = [header for share, _ in scans for header in share]
        errors = [error for _, share in scans for error in share]
        if errors:
            log.warning("disk tier: %d headers can't be read, so their slots are empty: %s", len(errors), errors[0])
        headers.sort(key=lambda header: header.stamp)
        for header in headers:
            self._stamps[header.slot] = header.stamp
        log.info("disk tier: %d records in %d slots, %.2f s", len(headers), self.slots, time.monotonic() - begin)
        return [StoredRecord(header.slot, header.key, header.generation, header.parent) for header in headers]

    def _scan_slots(self, slots: range) -> tuple[list[RecordHeader], list[OSError]]:
        sector = aligned(SECTOR)
        headers, errors = [], []
        for slot in slots:
            file, index = self.place(slot)
            try:
                file.read([sector], index)
            except OSError as error:
                errors.append(error)
                continue
            header = parse_header(sector)
            if header is None or header.slot != slot or header.length != self.block_bytes:
                continue
            if header.stamp >> _COUNTER_BITS >= file.first_epoch:
                headers.append(header)
        return headers, errors


class _Scratch:
    """Memory of one thread: a header sector, and a payload for callers whose buffers direct I/O can't use."""

    def __init__(self, size: int) -> None:
        memory = aligned(size)
        self.header, self.payload = memory[:SECTOR], memory[SECTOR:]
        self.erase_failures = 0


_TOMBSTONE = aligned(SECTOR)


def _is_direct(buffer: memoryview) -> bool:
    """Return whether direct I/O can use a caller's memory: whole sectors from the beginning of one."""
    if buffer.nbytes % SECTOR:
        return False
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % SECTOR == 0
