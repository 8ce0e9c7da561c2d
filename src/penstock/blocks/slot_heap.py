"""A heap of slots, from which any slot can be taken out."""

from heapq import heapify, heappop, heappush

SLACK = 64
"""Stale entries that are not worth a new heap."""


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

    def exchange(self, slot: int, rank: int) -> int | None:
        """Put a slot in and take the one of the lowest rank out, which costs little where that is the same."""
        if not self._heap or (rank, slot) < self._heap[0]:
            return slot
        self.push(slot, rank)
        return self.pop()

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
