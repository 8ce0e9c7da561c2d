"""The lineage eviction order: blocks that nothing builds on go first, so that no hole appears inside a prefix."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_table import BlockTable
from penstock.blocks.eviction_order import OrderState, OrderWithoutNotes
from penstock.blocks.slot_heap import SlotHeap
from penstock.kernel.machine import Nanos


class LineageOrder(OrderWithoutNotes):
    """Leaves first, the one idle for longest before others.

    A leaf is a block that is no registered block's parent. A block whose last child goes becomes a leaf and keeps its
    old tick. Where every idle block has a child (in use without its parent), the one idle for longest goes: an
    allocation never fails for the sake of the order.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._ticks: OrderedDict[int, int] = OrderedDict()  # idle slots, idle for longest first
        self._leaves = SlotHeap()
        self._children: dict[BlockKey, int] = {}  # registered blocks by parent, whether that is there or not
        self._clock = 0

    def __len__(self) -> int:
        return len(self._ticks)

    def __contains__(self, slot: object) -> bool:
        return slot in self._ticks

    def registered(self, slots: Sequence[int]) -> None:
        children, parents, index = self._children, self._table.parent, self._table.index
        for slot in slots:
            parent = parents[slot]
            if parent is not None:
                count = children.get(parent, 0)
                children[parent] = count + 1
                if not count and (above := index.get(parent)) is not None:
                    self._leaves.discard(above)

    def unregistered(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._lose(slot)

    def enter(self, slots: Sequence[int]) -> None:
        keys, children, ticks = self._table.key, self._children, self._ticks
        for slot in slots:
            self._clock += 1
            ticks[slot] = self._clock
            if keys[slot] not in children:
                self._leaves.push(slot, self._clock)

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._ticks[slot]
            self._leaves.discard(slot)

    def evictable(self, now: Nanos) -> int:
        return len(self._ticks)

    def evict(self, count: int, now: Nanos) -> list[int]:
        slots: list[int] = []
        for _ in range(min(count, len(self._ticks))):
            slot = self._leaves.pop()
            if slot is None:
                slot = next(iter(self._ticks))
            del self._ticks[slot]
            self._lose(slot)
            slots.append(slot)
        return slots

    def clear(self) -> list[int]:
        slots = list(self._ticks)
        self._ticks.clear()
        self._leaves = SlotHeap()
        self.unregistered(slots)
        return slots

    def state(self) -> OrderState:
        return OrderState(idle=list(self._ticks), ranks=list(self._ticks.values()), clock=self._clock)

    def restore(self, state: OrderState) -> None:
        table = self._table
        self._ticks = OrderedDict(zip(state.idle, state.ranks, strict=True))
        self._clock = state.clock
        self._children = dict(Counter(parent for slot in table.index.values() if (parent := table.parent[slot])))
        self._leaves = SlotHeap()
        for slot, tick in self._ticks.items():
            if table.key[slot] not in self._children:
                self._leaves.push(slot, tick)

    def _lose(self, slot: int) -> None:
        """Take a child from a block's parent, which may be a leaf then."""
        parent = self._table.parent[slot]
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._table.index.get(parent)
        if above is not None and (tick := self._ticks.get(above)) is not None:
            self._leaves.push(above, tick)
