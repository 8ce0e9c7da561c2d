"""Index of what a guarded tier stored: per key length, checksum and generation, in an append log beside the tier.

A record is 44 bytes with a checksum of its own, so damage costs single records and a torn end costs the last one: both
make blocks misses. Engines that share a tier share the file: each append happens under a file lock, and every process
reads on from where it was. The log is not synced to disk: after a power cut a record may be missing, or be there
without its block, and either is a miss.
"""

import fcntl
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from penstock_kv.inside.block_checksum import ALGORITHM

log = logging.getLogger("vllm.penstock")

RECORD = Struct("<2sBBIQQ16s")
"""Magic, kind, checksum algorithm, generation, length, checksum, digest of the key; a CRC-32 of these follows."""
RECORD_BYTES = RECORD.size + 4
MAGIC = b"pg"
STORED, FORGOTTEN = 1, 2
SPARE_RECORDS = 4096
"""Records beyond twice the living ones that a log may have before it is written anew."""


class GuardRecord(NamedTuple):
    """What is known of one stored block. ``generation`` counts the stores of its key."""

    generation: int
    length: int
    checksum: int


class BlockSum(NamedTuple):
    """A block to record: the tier's key, and length and checksum of its bytes."""

    key: bytes
    length: int
    checksum: int


class GuardIndex:
    """Records by key, of this process and of all that share the file. Calls may come from several threads.

    Args:
        path: the log; its folder is made.
    Raises:
        OSError: it can't be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        """Records that could not be read."""
        self._records: dict[bytes, GuardRecord] = {}
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = -1
        self._open()
        with self._lock, self._locked():
            self._read_on()
            if self._total > 2 * len(self._records) + SPARE_RECORDS:
                self._write_anew()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: bytes) -> GuardRecord | None:
        """Return the newest record of a key. Cost: 1 us."""
        return self._records.get(_digest_of_key(key))

    def put(self, sums: Sequence[BlockSum]) -> None:
        """Record blocks that the tier has now.

        Raises:
            OSError: the log can't be written; then none of them is recorded.
        """
        with self._lock, self._locked():
            self._read_on()
            fresh = {}
            for block in sums:
                digest = _digest_of_key(block.key)
                before = self._records.get(digest)
                generation = 1 if before is None else before.generation + 1
                fresh[digest] = GuardRecord(generation & 0xFFFFFFFF, block.length, block.checksum)
            self._append(b"".join(_packed(STORED, digest, record) for digest, record in fresh.items()))
            self._records |= fresh

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget blocks, here at once. A log that can't be written makes them come back with a restart; whatever the
        tier then gives for them is compared with their sums again."""
        with self._lock:
            gone = {}
            for key in keys:
                digest = _digest_of_key(key)
                record = self._records.pop(digest, None)
                if record is not None:
                    gone[digest] = record
            if gone:
                try:
                    with self._locked():
                        self._append(b"".join(_packed(FORGOTTEN, digest, record) for digest, record in gone.items()))
                except OSError as error:
                    log.warning("the guard's index %s can't be written: %s", self.path, error)

    def refresh(self) -> None:
        """Read what other processes appended.

        Raises:
            OSError: the log can't be read.
        """
        with self._lock:
            if os.fstat(self._file).st_size != self._size or self._replaced():
                with self._locked():
                    self._read_on()

    def close(self) -> None:
        """Close the file; the index must not be used after that."""
        with self._lock:
            os.close(self._file)

    # --- under both locks ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        fresh = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._total = fresh, 0, 0

    def _replaced(self) -> bool:
        """Return whether somebody wrote the log anew under its name, or removed it."""
        try:
            return os.stat(self.path).st_ino != os.fstat(self._file).st_ino  # noqa: PTH116
        except FileNotFoundError:
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        while self._replaced():  # between our look and our lock
            self._open()
            self._records.clear()
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read_on(self) -> None:
        end = os.fstat(self._file).st_size
        if end < self._size:  # cut from outside: what we knew may be gone
            self._records.clear()
            self._size = self._total = 0
        while self._size < end:
            data = os.pread(self._file, min(end - self._size, RECORD_BYTES << 14), self._size)
            if not data:
                return
            whole = len(data) - len(data) % RECORD_BYTES
            for at in range(0, whole, RECORD_BYTES):
                self._take(data[at : at + RECORD_BYTES])
            self._total += whole // RECORD_BYTES
            if whole < len(data) and self._size + len(data) >= end:
                self._mend(len(data) - whole)
                end = os.fstat(self._file).st_size
                self._total += 1
                self._size += RECORD_BYTES
            self._size += whole

    def _take(self, raw: bytes) -> None:
        body = raw[: RECORD.size]
        if zlib.crc32(body) != int.from_bytes(raw[RECORD.size :], "little"):
            self.damaged += 1
            return
        magic, kind, algorithm, generation, length, checksum, digest = RECORD.unpack(body)
        if magic != MAGIC:
            self.damaged += 1
        elif kind == STORED and algorithm == ALGORITHM:
            self._records[digest] = GuardRecord(generation, length, checksum)
        else:  # forgotten, or with a sum that this process can't check
            self._records.pop(digest, None)

    def _mend(self, torn: int) -> None:
        """Fill a torn record up, so that the next one starts where records start."""
        self.damaged += 1
        os.write(self._file, bytes(RECORD_BYTES - torn))

    def _append(self, data: bytes) -> None:
        before = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, before)
            raise
        self._size = before + len(data)
        self._total += len(data) // RECORD_BYTES

    def _write_anew(self) -> None:
        part = self.path.with_suffix(f".part-{os.getpid()}")
        part.write_bytes(b"".join(_packed(STORED, digest, record) for digest, record in self._records.items()))
        part.replace(self.path)
        log.info("the guard's index %s has %d records, written anew", self.path, len(self._records))
        self._open()
        self._size = os.fstat(self._file).st_size
        self._total = len(self._records)


def _digest_of_key(key: bytes) -> bytes:
    return blake2b(key, digest_size=16, person=b"penstock-guard").digest()


def _packed(kind: int, digest: bytes, record: GuardRecord) -> bytes:
    body = RECORD.pack(MAGIC, kind, ALGORITHM, record.generation, record.length, record.checksum, digest)
    return body + zlib.crc32(body).to_bytes(4, "little")
