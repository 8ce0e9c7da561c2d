"""The header of a stored block: what lies beside its bytes in a slab file or an object, and what is checked on a read.

Little endian, `SIZE` bytes, in a slab file padded with zeros to a sector of `SECTOR`:

    8s magic | u16 version | u8 key length | u8 parent length (255: none) | u32 0 | u64 slot | u64 payload length
    u64 generation | u64 stamp | u64 XXH3-64 of the payload | 64s key | 64s parent | u64 XXH3-64 of all before

The stamp is a number that the store never gives twice, restarts included: a disk that lost a write still has the
record before it, whole and with a right checksum, and only the stamp tells the two apart.
"""

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult

SECTOR = 4096
"""Bytes: the unit of direct I/O on every disk that is sold, and a page."""
KEY_MAX = 64

_MAGIC = b"PSKVBLK\n"
_VERSION = 1
_NO_PARENT = 255
_BODY = struct.Struct(f"<8sHBBIQQQQQ{KEY_MAX}s{KEY_MAX}s")
_SUM = struct.Struct("<Q")
SIZE = _BODY.size + _SUM.size


class RecordHeader(NamedTuple):
    """What a header says of its block. ``length``: of the payload, bytes; ``checksum``: XXH3-64 of the payload."""

    slot: int
    key: bytes
    parent: bytes | None
    length: int
    generation: int
    stamp: int
    checksum: int


def pack_header(header: RecordHeader) -> bytes:
    """Return the header's `SIZE` bytes.

    Raises:
        ValueError: key or parent is longer than `KEY_MAX`.
    """
    if len(header.key) > KEY_MAX or len(header.parent or b"") > KEY_MAX:
        raise ValueError(f"a key of {len(header.key)} bytes does not fit in a header, which has {KEY_MAX}")
    body = _BODY.pack(
        _MAGIC,
        _VERSION,
        len(header.key),
        _NO_PARENT if header.parent is None else len(header.parent),
        0,
        header.slot,
        header.length,
        header.generation,
        header.stamp,
        header.checksum,
        header.key,
        header.parent or b"",
    )
    return body + _SUM.pack(xxh3_64_intdigest(body))


def parse_header(raw: bytes | memoryview) -> RecordHeader | None:
    """Return what a header says; None where it is none of this version, or a byte of it is wrong."""
    if len(raw) < SIZE or bytes(raw[:8]) != _MAGIC:
        return None
    body = bytes(raw[: _BODY.size])
    if _SUM.unpack_from(raw, _BODY.size)[0] != xxh3_64_intdigest(body):
        return None
    _, version, size, parent_size, _, slot, length, generation, stamp, checksum, key, parent = _BODY.unpack(body)
    if version != _VERSION or size > KEY_MAX:
        return None
    before = None if parent_size == _NO_PARENT else parent[:parent_size]
    return RecordHeader(slot, key[:size], before, length, generation, stamp, checksum)


def check_record(
    header: RecordHeader | None,
    block: BlockIo,
    payload: memoryview,
    stamp: int | None = None,
    *,
    checksum: int | None = None,
) -> BlockResult:
    """Compare what was read with what was wanted; the payload's checksum comes last, since it costs most.

    Args:
        header: None where it is broken.
        block: its key, generation and slot are the wanted ones.
        payload: the bytes that were read, shape (block_bytes,).
        stamp: of the last write to this slot; None where the store has no stamps.
        checksum: XXH3-64 of the payload where the caller computed it.
    """
    if header is None:
        return BlockResult("corrupt", "the header is broken")
    if header.generation != block.generation:
        return BlockResult("stale", f"the record has generation {header.generation}, not {block.generation}")
    if stamp is not None and header.stamp != stamp:
        return BlockResult("stale", "the record is of an earlier write: the disk lost the last one")
    if header.slot != block.slot and stamp is not None:
        return BlockResult("corrupt", f"the record is that of slot {header.slot}")
    if header.key != block.key:
        return BlockResult("corrupt", "the record has another key")
    if header.length != len(payload):
        return BlockResult("corrupt", f"the record has {header.length} bytes, not {len(payload)}")
    if (xxh3_64_intdigest(payload) if checksum is None else checksum) != header.checksum:
        return BlockResult("corrupt", "the payload's checksum is wrong")
    return BlockResult("ok", checksum=header.checksum)


def misfit(block: BlockIo, slots: int, block_bytes: int) -> str:
    """Return why a store of such a shape can't carry out a call; empty where it can."""
    if not 0 <= block.slot < slots:
        return f"slot {block.slot} is not one of {slots}"
    if block.buffer.nbytes != block_bytes:
        return f"the buffer has {block.buffer.nbytes} bytes, a block {block_bytes}"
    if len(block.key) > KEY_MAX or len(block.parent or b"") > KEY_MAX:
        return f"a key is longer than {KEY_MAX} bytes"
    return ""
