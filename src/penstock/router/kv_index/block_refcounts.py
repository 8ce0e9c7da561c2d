"""`BlockRefcounts`: how many copies of a block a worker holds, where it announces each of them."""

from collections.abc import Iterable

from penstock.router.kv_index.index_states import CopiesState
from penstock.router.kv_index.worker_bitmap import bits


class BlockRefcounts:
    """Copies beyond the first, of the workers (bits) that announce each copy; there are few of them."""

    __slots__ = ("_more", "bits")

    def __init__(self) -> None:
        self.bits = 0
        """Workers that announce each copy."""
        self._more: dict[int, dict[int, int]] = {}

    def of(self, bit: int) -> dict[int, int]:
        """Return block -> copies beyond the first; blocks with only one are absent."""
        return self._more.get(bit, {})

    def again(self, bit: int, blocks: Iterable[int]) -> None:
        """A worker announced blocks that it holds already."""
        if self.bits & bit:
            more = self._more.setdefault(bit, {})
            for block in blocks:
                more[block] = more.get(block, 0) + 1

    def take(self, bit: int, block: int) -> bool:
        """Take one copy of a block away; False where it is the last one."""
        more = self._more.get(bit, {})
        left = more.get(block, 0)
        if left > 1:
            more[block] = left - 1
        elif left:
            del more[block]
        return left > 0

    def drop(self, bit: int, blocks: Iterable[int]) -> None:
        """A worker holds blocks no more, for whatever reason."""
        more = self._more.get(bit)
        if more:
            for block in blocks:
                more.pop(block, None)

    def forget(self, bit: int) -> None:
        """A worker is gone or empty."""
        self._more.pop(bit, None)
        self.bits &= ~bit

    def snapshot(self) -> CopiesState:
        """Return the state; bits by their numbers."""
        more = {bit.bit_length() - 1: blocks for bit, blocks in self._more.items()}
        return CopiesState(list(bits(self.bits)), more)

    def restore(self, state: CopiesState) -> None:
        """Become the copies of a state."""
        self.bits = sum(1 << slot for slot in state.slots)
        self._more = {1 << slot: blocks for slot, blocks in state.more.items()}
