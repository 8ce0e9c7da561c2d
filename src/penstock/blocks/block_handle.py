"""Handles of blocks: a strong one holds blocks until it is released, a weak one only remembers a block."""

from types import TracebackType
from typing import Protocol

import msgspec

from penstock.blocks.block_key import BlockKey


class HandleOwner(Protocol):
    """What a handle needs of its manager."""

    def release(self, handle: "BlockHandle") -> None: ...
    def dropped(self, id: int, slots: list[int]) -> None: ...


class BlockHandle:
    """Holds blocks for one holder, in order, until `release`, the end of a ``with``, or its last reference goes.

    The last is a leak: the manager counts it, and takes the blocks back with its next call.

    Args:
        slots: the blocks. `BlockManager.register` replaces those that exist already; nobody else writes.
        evicted: slot and key of what gave way for them: to be announced, and its bytes stay until the slot is written.
    """

    __slots__ = ("_manager", "evicted", "id", "released", "slots")

    def __init__(self, manager: HandleOwner, id: int, slots: list[int], evicted: list[tuple[int, BlockKey]]) -> None:
        self._manager = manager
        self.id = id
        self.slots = slots
        self.evicted = evicted
        self.released = False

    def __len__(self) -> int:
        return len(self.slots)

    def __enter__(self) -> "BlockHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.released:
            self.release()

    def __del__(self) -> None:
        if not self.released:
            self._manager.dropped(self.id, self.slots)

    def release(self) -> None:
        """Give the blocks back; registered ones stay matchable until they are evicted.

        Raises:
            InvariantError: it was released already.
        """
        self._manager.release(self)


class WeakHandle(msgspec.Struct, frozen=True):
    """Remembers a registered block without holding it: `BlockManager.upgrade` gives a handle as long as it is there."""

    slot: int
    generation: int
    key: BlockKey


class OpenHandle(msgspec.Struct, frozen=True):
    """The manager's record of a handle that is not released.

    Args:
        since: when the blocks were taken, in kernel time.
    """

    id: int
    owner: str
    slots: list[int]
    since: int
