"""The priority eviction order: lower priorities go first, and pinned blocks not before their time."""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.blocks.block_table import BlockTable
from penstock.blocks.eviction_order import OrderState, OrderWithoutNotes
from penstock.blocks.slot_heap import SlotHeap
from penstock.kernel.machine import Nanos

LOWEST = 0


class PriorityOrder(OrderWithoutNotes):
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
        slots = self.state().idle
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

    def state(self) -> OrderState:
        levels = [slot for priority in self._priorities for slot in self._levels[priority]]
        return OrderState(idle=[*levels, *sorted(self._pinned.ranks)])

    def restore(self, state: OrderState) -> None:
        self.clear()
        self.enter(state.idle)

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
