"""The segmented eviction order: blocks that were used seldom go before those that are used often (TinyLFU counts)."""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_table import BlockTable
from penstock.blocks.eviction_order import OrderState, OrderWithoutNotes
from penstock.blocks.frequency_sketch import FrequencySketch
from penstock.kernel.machine import Nanos

THRESHOLDS = (3, 8, 15)
"""Uses from which a block is warm, hot and very hot: Dynamo's KVBM has the same; no measurement of ours chose them."""


class SegmentedOrder(OrderWithoutNotes):
    """Four segments by uses, the coldest first; within one, the block that is idle for longest.

    A block's segment is chosen when it becomes idle. A registration is a use, and so is each match.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._segments: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(len(THRESHOLDS) + 1)]
        self._segment_of: dict[int, int] = {}
        self._sketch = FrequencySketch(table.slots)

    def __len__(self) -> int:
        return len(self._segment_of)

    def __contains__(self, slot: object) -> bool:
        return slot in self._segment_of

    def registered(self, slots: Sequence[int]) -> None:
        self.hit(slots)

    def hit(self, slots: Sequence[int]) -> None:
        add = self._sketch.add
        for slot in slots:
            add(self._key(slot))

    def enter(self, slots: Sequence[int]) -> None:
        first, second, third = THRESHOLDS
        for slot in slots:
            uses = self._sketch.count(self._key(slot))
            segment = (uses >= first) + (uses >= second) + (uses >= third)
            self._segments[segment][slot] = None
            self._segment_of[slot] = segment

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._segments[self._segment_of.pop(slot)][slot]

    def evictable(self, now: Nanos) -> int:
        return len(self._segment_of)

    def evict(self, count: int, now: Nanos) -> list[int]:
        slots: list[int] = []
        for segment in self._segments:
            while segment and len(slots) < count:
                slot, _ = segment.popitem(last=False)
                del self._segment_of[slot]
                slots.append(slot)
        return slots

    def clear(self) -> list[int]:
        return self.evict(len(self._segment_of), 0)

    def state(self) -> OrderState:
        idle = [slot for segment in self._segments for slot in segment]
        return OrderState(
            idle=idle,
            ranks=[self._segment_of[slot] for slot in idle],
            clock=self._sketch.uses,
            sketch=self._sketch.dump(),
        )

    def restore(self, state: OrderState) -> None:
        self._segment_of = dict(zip(state.idle, state.ranks, strict=True))
        self._segments = [OrderedDict() for _ in self._segments]
        for slot, segment in self._segment_of.items():
            self._segments[segment][slot] = None
        self._sketch.load(state.sketch, state.clock)

    def _key(self, slot: int) -> BlockKey:
        key = self._table.key[slot]
        assert key is not None, "only registered blocks are counted"
        return key
