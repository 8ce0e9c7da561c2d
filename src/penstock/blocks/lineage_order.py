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
            if (above := self._new_leaf(slot)) is not None:
                self._leaves.push(above, self._ticks[above])

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
        ticks, leaves, new_leaf = self._ticks, self._leaves, self._new_leaf
        above: int | None = None
        for _ in range(min(count, len(ticks))):
            slot = leaves.pop() if above is None else leaves.exchange(above, ticks[above])
            if slot is None:
                slot = next(iter(ticks))
            del ticks[slot]
            slots.append(slot)
            above = new_leaf(slot)
        if above is not None:
            leaves.push(above, ticks[above])
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

    def _new_leaf(self, slot: int) -> int | None:
        """Take a child from a block's parent; return the parent where that is idle and a leaf now."""
        parent = self._table.parent[slot]
        if parent is None:
            return None
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return None
        del self._children[parent]
        above = self._table.index.get(parent)
        return above if above in self._ticks else None
