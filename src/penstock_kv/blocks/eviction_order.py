"""Eviction orders of idle blocks: the Protocol, the least recently used one, and the one by priority, with pins."""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from penstock.kernel.machine import Nanos
from penstock_kv.blocks.block_table import BlockTable

LOWEST = 0
"""Priority of a block of which nobody said one, and of one whose pin ran out."""
SLACK = 64
"""Stale entries that are not worth a new heap."""


class EvictionOrder(Protocol):
    """Which idle block goes first. Slots are idle between `enter` and `leave`, `evict` or `clear`.

    Cost: O(1) or O(log n) per slot, but for `clear`, `state` and `restore`.
    """

    def __len__(self) -> int:
        """Return how many slots are idle."""
        ...

    def __contains__(self, slot: object) -> bool: ...

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

    def state(self) -> list[int]:
        """Return the idle slots in the order in which `restore` takes them; the rest is in the table's columns."""
        ...

    def restore(self, idle: Sequence[int]) -> None:
        """Become the order that had this ``state``; the table is restored already."""
        ...


class LruOrder:
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

    def pin(self, slot: int, until: Nanos) -> bool:
        return False

    def state(self) -> list[int]:
        return list(self._idle)

    def restore(self, idle: Sequence[int]) -> None:
        self._idle = OrderedDict.fromkeys(idle)


class PriorityOrder:
    """The lowest priority first; within one, the block that is idle for longest.

    A pinned block is not evicted until its time. Then it has the lowest priority, and is the next of that to go: it was
    kept for as long as anybody wanted it.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._levels: dict[int, OrderedDict[int, None]] = {}  # idle slots that are not pinned, by priority
        self._priorities: list[int] = []  # keys of the above, ascending: few, since a level without slots goes
        self._level_of: dict[int, int] = {}
        self._pinned = SlotHeap()

    def __len__(self) -> int:
        return len(self._level_of) + len(self._pinned)

    def __contains__(self, slot: object) -> bool:
        return slot in self._level_of or slot in self._pinned.ranks

    def enter(self, slots: Sequence[int]) -> None:
        pinned, priorities = self._table.pinned_until, self._table.priority
        for slot in slots:
            if pinned[slot]:
                self._pinned.push(slot, pinned[slot])
            else:
                self._append(slot, priorities[slot])

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._level_of:
                self._remove(slot)
            else:
                self._pinned.discard(slot)

    def evictable(self, now: Nanos) -> int:
        self._demote(now)
        return len(self._level_of)

    def evict(self, count: int, now: Nanos) -> list[int]:
        self._demote(now)
        slots: list[int] = []
        for _ in range(min(count, len(self._level_of))):
            slot = next(iter(self._levels[self._priorities[0]]))
            self._remove(slot)
            slots.append(slot)
        return slots

    def clear(self) -> list[int]:
        slots = self.state()
        self._levels, self._priorities, self._level_of, self._pinned = {}, [], {}, SlotHeap()
        return slots

    def pin(self, slot: int, until: Nanos) -> bool:
        idle = slot in self
        if idle:
            self.leave((slot,))
        self._table.pinned_until[slot] = until
        if idle:
            self.enter((slot,))
        return True

    def state(self) -> list[int]:
        levels = [slot for priority in self._priorities for slot in self._levels[priority]]
        return [*levels, *sorted(self._pinned.ranks)]

    def restore(self, idle: Sequence[int]) -> None:
        self.clear()
        self.enter(idle)

    def _demote(self, now: Nanos) -> None:
        """Make pinned blocks whose time has come evictable, those whose time came first before the others."""
        due: list[int] = []
        while (slot := self._pinned.pop(now)) is not None:
            due.append(slot)
        for slot in reversed(due):
            self._table.pinned_until[slot] = 0
            self._table.priority[slot] = LOWEST
            self._append(slot, LOWEST)
            self._levels[LOWEST].move_to_end(slot, last=False)

    def _append(self, slot: int, priority: int) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            self._priorities = sorted(self._levels)
        level[slot] = None
        self._level_of[slot] = priority

    def _remove(self, slot: int) -> None:
        priority = self._level_of.pop(slot)
        level = self._levels[priority]
        del level[slot]
        if not level:
            del self._levels[priority]
            self._priorities.remove(priority)


class SlotHeap:
    """Slots by rank, lowest first.

    An entry that is taken out stays in the heap until it comes up, or until half of the entries are stale.
    """

    __slots__ = ("_heap", "ranks")

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.ranks)

    def push(self, slot: int, rank: int) -> None:
        """Put a slot in. Cost: O(log n), amortised."""
        self.ranks[slot] = rank
        heappush(self._heap, (rank, slot))
        if len(self._heap) > 2 * len(self.ranks) + SLACK:
            self._heap = [(rank, slot) for slot, rank in self.ranks.items()]
            heapify(self._heap)

    def discard(self, slot: int) -> None:
        """Take a slot out, where it is in."""
        self.ranks.pop(slot, None)

    def pop(self, limit: int | None = None) -> int | None:
        """Take the slot of the lowest rank out, where that is no more than ``limit``; None where there is none."""
        heap, ranks = self._heap, self.ranks
        while heap:
            rank, slot = heap[0]
            current = ranks.get(slot) == rank
            if current and limit is not None and rank > limit:
                return None
            heappop(heap)
            if current:
                del ranks[slot]
                return slot
        return None
