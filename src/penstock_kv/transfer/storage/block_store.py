"""`BlockStore`: the protocol of where a tier's blocks lie, and what came of each read or write."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

Outcome = Literal["ok", "absent", "corrupt", "stale", "failed", "late"]
"""``corrupt``: key, length or checksum is wrong; ``stale``: another generation; ``late``: after the deadline."""


class BlockIo(NamedTuple):
    """One block to read or write.

    Args:
        slot: of the store.
        key: bytes of its `penstock_kv.blocks.block_key.BlockKey`.
        generation: of the slot; a record of another one is stale.
        buffer: the payload's memory, ``block_bytes`` long, contiguous and page-aligned (another is copied once more).
        parent: key of the block before it, stored beside it.
        checksum: XXH3-64 of the payload where it is known, for a write: the record gets this one, so that a byte that
            changed in memory since then is a miss later. None: the store computes it.
    """

    slot: int
    key: bytes
    generation: int
    buffer: memoryview
    parent: bytes | None = None
    checksum: int | None = None


class BlockResult(NamedTuple):
    """What came of one block. ``cause``: of a failure, in words; ``checksum``: XXH3-64 of the payload, where ok."""

    outcome: Outcome
    cause: str = ""
    checksum: int = 0


class StoredRecord(NamedTuple):
    """A record that survived a restart."""

    slot: int
    key: bytes
    generation: int
    parent: bytes | None


class BlockStore(Protocol):
    """Where the bytes of one tier are: a slab of memory, files in directories, an object store.

    Calls come from one event loop. None of them raises for a block: a fault is that block's result. A call past its
    deadline returns ``late`` for what is open, and keeps ``busy`` slots until the system call ends.
    """

    block_bytes: int

    async def write(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        """Store blocks; ``deadline`` in seconds from now. A record counts once it is whole: a crash leaves none."""
        ...

    async def read(self, blocks: Sequence[BlockIo], deadline: float) -> list[BlockResult]:
        """Read blocks and check them. A buffer's content counts only where its result is ``ok``."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """Make sure that these records are never read again, after a restart neither."""
        ...

    def records(self) -> list[StoredRecord]:
        """Return what was there when the store was opened, the longest unused first."""
        ...

    def busy(self) -> frozenset[int]:
        """Return slots that a hanging call still touches."""
        ...

    async def close(self) -> None:
        """Write what has to be, and stop; a second time does nothing."""
        ...
