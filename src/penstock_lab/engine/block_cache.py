"""Block cache of the simulated engine: counts, names and reference counts of KV blocks; no tensors.

A block is free, or *private* to one request (a part-filled block, or one that may not be shared), or *named* by its
chained hash. A named block is *held* while a request uses it and *idle* afterwards: idle blocks are the prefix cache,
and the one idle for longest is evicted when no block is free.

A request that holds a block holds all blocks before it, and lets go of the last one first. So two things always hold,
and both make this quick: a cached block's predecessors are cached too (depth is found by bisection), and along a
chain reference counts never rise (the shared part of a chain is a prefix of it).
"""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Snapshot


class BlockCache:
    """All blocks of one engine.

    Args:
        blocks: how many there are.
    """

    __slots__ = ("_idle", "_more", "_referenced", "blocks", "free", "private")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self.private = 0
        self._referenced: set[int] = set()
        self._more: dict[int, int] = {}  # holders beyond the first, of blocks that have several
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle for longest first

    @staticmethod
    def chain(names: Sequence[int]) -> list[int]:
        """Return the names of a prompt's blocks, as a list of its own."""
        return list(names)

    @property
    def available(self) -> int:
        """Blocks that can be taken: the free ones and those that may be evicted."""
        return self.free + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.private + len(self._referenced)

    @property
    def cached(self) -> int:
        """Named blocks, held or idle."""
        return len(self._referenced) + len(self._idle)

    def depth(self, chain: Sequence[int], limit: int) -> int:
        """Count the leading blocks of ``chain[:limit]`` that are cached. Cost: O(log limit) look-ups."""
        referenced, idle = self._referenced, self._idle
        if not limit or (chain[0] not in referenced and chain[0] not in idle):
            return 0
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) >> 1
            name = chain[middle - 1]
            if name in referenced or name in idle:
                low = middle
            else:
                high = middle - 1
        return low

    def referenced_depth(self, chain: Sequence[int], limit: int) -> int:
        """Count the leading blocks of ``chain[:limit]`` that some request holds. Cost: O(log limit) look-ups."""
        referenced = self._referenced
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) >> 1
            if chain[middle - 1] in referenced:
                low = middle
            else:
                high = middle - 1
        return low

    def hold(self, chain: Sequence[int], start: int, end: int) -> None:
        """Hold the cached blocks ``chain[start:end]`` for one more request."""
        shared = self.referenced_depth(chain, end)
        more = self._more
        for name in chain[start : min(shared, end)]:
            more[name] = more.get(name, 0) + 1
        woken = chain[max(shared, start) : end]
        idle = self._idle
        for name in woken:
            del idle[name]
        self._referenced.update(woken)

    def take(self, count: int) -> list[int]:
        """Make ``count`` blocks private, evicting where none is free; returns the names evicted, in order."""
        evicted: list[int] = []
        short = count - self.free
        if short > 0:
            pop = self._idle.popitem
            evicted = [pop(last=False)[0] for _ in range(short)]
            self.free = 0
        else:
            self.free -= count
        self.private += count
        return evicted

    def name(self, chain: Sequence[int], start: int, end: int) -> int:
        """Name the private blocks of a request that holds ``chain[:start]``: they are now ``chain[start:end]``.

        Returns: how many of them were cached already; the request now holds those, and its own copies are free.
        """
        fresh = start
        if chain[start] in self._referenced or chain[start] in self._idle:
            fresh = self.depth(chain, end)
            self.hold(chain, start, fresh)
            self.free += fresh - start
        self._referenced.update(chain[fresh:end])
        self.private -= end - start
        return fresh - start

    def release(self, chain: Sequence[int], named: int, private: int) -> None:
        """Let go of ``chain[:named]``, the last block first, and of so many private blocks."""
        self.private -= private
        self.free += private
        more = self._more
        # Blocks with several holders are a prefix of the chain: find where it ends.
        low, high = 0, named if more else 0
        while low < high:
            middle = (low + high + 1) >> 1
            if chain[middle - 1] in more:
                low = middle
            else:
                high = middle - 1
        for name in chain[:low]:
            if more[name] == 1:
                del more[name]
            else:
                more[name] -= 1
        mine = chain[low:named]
        self._referenced.difference_update(mine)
        self._idle.update(dict.fromkeys(reversed(mine)))

    def drop_idle(self) -> list[int]:
        """Forget all blocks that no request holds; returns their names, the one idle for longest first."""
        names = list(self._idle)
        self.free += len(names)
        self._idle.clear()
        return names

    def snapshot(self) -> Snapshot:
        """Return the state as plain data."""
        return {
            "free": self.free,
            "private": self.private,
            "held": sorted(self._referenced),
            "more": sorted(self._more.items()),
            "idle": list(self._idle),
        }

    def restore(self, state: Snapshot) -> None:
        """Become what `snapshot` wrote."""
        self.free = state["free"]
        self.private = state["private"]
        self._referenced = set(state["held"])
        self._more = dict(state["more"])
        self._idle = OrderedDict.fromkeys(state["idle"])

    def check(self, holders: dict[int, int], private: int) -> None:
        """Compare with a recount.

        Args:
            holders: requests that hold each named block.
            private: private blocks of all requests.
        Raises:
            InvariantError: a block is lost or counted twice.
        """
        if self.free + self.private + len(self._referenced) + len(self._idle) != self.blocks:
            raise InvariantError(
                f"{self.free} free + {self.private} private + {len(self._referenced)} held + "
                f"{len(self._idle)} idle blocks are not {self.blocks}"
            )
        if self.private != private:
            raise InvariantError(f"{self.private} private blocks, but requests have {private}")
        counted = {name: 1 + self._more.get(name, 0) for name in self._referenced}
        if counted != holders or self._more.keys() - self._referenced or not self._referenced.isdisjoint(self._idle):
            raise InvariantError("reference counts of named blocks differ from what requests hold")
        if self.free < 0 or self.private < 0:
            raise InvariantError(f"{self.free} free, {self.private} private blocks")
