"""Eviction orders of idle blocks: the Protocol, and the least recently used one."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.blocks.block_table import BlockTable
from penstock.kernel.machine import Nanos


class OrderState(msgspec.Struct, frozen=True, kw_only=True):
    """What an order remembers besides the table's columns.

    Args:
        idle: its slots, in its order.
        ranks: a number for each of them, where the order has one.
        clock: the order's counter.
        sketch: how often keys were used.
    """

    idle: list[int]
    ranks: list[int] = []
    clock: int = 0
    sketch: bytes = b""


class EvictionOrder(Protocol):
    """Which idle block goes first. Slots are idle between `enter` and `leave`, `evict` or `clear`.

    Cost: O(1) or O(log n) per slot, but for `clear`, `state` and `restore`.
    """

    def __len__(self) -> int:
        """Return how many slots are idle."""
        ...

    def __contains__(self, slot: object) -> bool: ...

    def registered(self, slots: Sequence[int]) -> None:
        """Take note of blocks that have a key now."""
        ...

    def unregistered(self, slots: Sequence[int]) -> None:
        """Take note of blocks that lose their key and are not idle; their columns still have it."""
        ...

    def hit(self, slots: Sequence[int]) -> None:
        """Take note of blocks that were matched, idle or not."""
        ...

    def enter(self, slots: Sequence[int]) -> None:
        """Make slots idle, in the order given: the last block of a prefix first."""
        ...

    def leave(self, slots: Sequence[int]) -> None:
        """Take idle slots back into use."""
        ...

    def evictable(self, now: Nanos) -> int:
        """Count the idle slots that `evict` would give up."""
        ...

    def evict(self, count: int, now: Nanos) -> list[int]:
        """Give up to ``count`` idle slots up, in order; they are about to lose their keys."""
        ...

    def clear(self) -> list[int]:
        """Give all idle slots up, pinned ones included."""
        ...

    def pin(self, slot: int, until: Nanos) -> bool:
        """Keep a block until then; returns False where this order has no pins."""
        ...

    def state(self) -> OrderState: ...
    def restore(self, state: OrderState) -> None:
        """Become the order that wrote ``state``; the table is restored already."""
        ...


class OrderWithoutNotes:
    """What an order does with news that it takes no note of: nothing. It has no pins."""

    def registered(self, slots: Sequence[int]) -> None:
        pass

    def unregistered(self, slots: Sequence[int]) -> None:
        pass

    def hit(self, slots: Sequence[int]) -> None:
        pass

    def pin(self, slot: int, until: Nanos) -> bool:
        return False


class LruOrder(OrderWithoutNotes):
    """The block that is idle for longest goes first."""

    def __init__(self, table: BlockTable) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, slot: object) -> bool:
        return slot in self._idle

    def enter(self, slots: Sequence[int]) -> None:
        self._idle.update(dict.fromkeys(slots))

    def leave(self, slots: Sequence[int]) -> None:
        idle = self._idle
        for slot in slots:
            del idle[slot]

    def evictable(self, now: Nanos) -> int:
        return len(self._idle)

    def evict(self, count: int, now: Nanos) -> list[int]:
        pop = self._idle.popitem
        return [pop(last=False)[0] for _ in range(min(count, len(self._idle)))]

    def clear(self) -> list[int]:
        slots = list(self._idle)
        self._idle.clear()
        return slots

    def state(self) -> OrderState:
        return OrderState(idle=list(self._idle))

    def restore(self, state: OrderState) -> None:
        self._idle = OrderedDict.fromkeys(state.idle)
