"""Block cache of the simulated engine for prompts that come as runs of blocks.

The same cache as `penstock_lab.engine.block_cache`, which is the yardstick that it is tested against: equal answers,
equal evictions in an equal order. Here what is held of a run is a number, and what is idle are stretches of runs, so a
call costs as much as there are runs in the prompt, not blocks.
"""

from collections.abc import Sequence

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Snapshot
from penstock_lab.runs.block_runs import Aged, Chain, Holders, Stretches, chain_of, depth_in


class RunCache:
    """All blocks of one engine; chains are `penstock_lab.runs.block_runs.Chain`.

    Args:
        blocks: how many there are.
    """

    __slots__ = ("_cached", "_idle", "_referenced", "blocks", "free", "private")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self.private = 0
        self._referenced = Holders()
        self._idle = Aged()
        self._cached: dict[int, int] = {}
        """run -> blocks of it that are held or idle"""

    @staticmethod
    def chain(names: Sequence[int]) -> Chain:
        """Return the names of a prompt's blocks as runs."""
        return names if isinstance(names, Chain) else chain_of(names)

    @property
    def available(self) -> int:
        """Blocks that can be taken: the free ones and those that may be evicted."""
        return self.free + self._idle.total

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.private + self._referenced.total

    @property
    def cached(self) -> int:
        """Named blocks, held or idle."""
        return self._referenced.total + self._idle.total

    def depth(self, chain: Chain, limit: int) -> int:
        """Count the leading blocks of ``chain[:limit]`` that are cached."""
        return depth_in(self._cached, chain, limit)

    def referenced_depth(self, chain: Chain, limit: int) -> int:
        """Count the leading blocks of ``chain[:limit]`` that some request holds."""
        return depth_in(self._referenced.reach, chain, limit)

    def hold(self, chain: Chain, start: int, end: int) -> None:
        """Hold the cached blocks ``chain[start:end]`` for one more request, which holds ``chain[:start]``."""
        for run, low, high in chain.cut(start, end):
            if self._referenced.extend(run, low, high) < high:
                self._idle.take(run, high)

    def take(self, count: int) -> Stretches | None:
        """Make ``count`` blocks private, evicting where none is free; returns the names evicted, each from its end."""
        self.private += count
        short = count - self.free
        if short <= 0:
            self.free -= count
            return None
        self.free = 0
        return self._evict(short)

    def name(self, chain: Chain, start: int, end: int) -> int:
        """Name the private blocks of a request that holds ``chain[:start]``: they are now ``chain[start:end]``.

        Returns: how many of them were cached already; the request now holds those, and its own copies are free.
        """
        fresh = depth_in(self._cached, chain, end)
        if fresh > start:
            self.hold(chain, start, fresh)
            self.free += fresh - start
        else:
            fresh = start
        if fresh < end:
            extend, cached = self._referenced.extend, self._cached
            for run, low, high in chain.cut(fresh, end):
                extend(run, low, high)
                cached[run] = high
        self.private -= end - start
        return fresh - start

    def release(self, chain: Chain, named: int, private: int) -> None:
        """Let go of ``chain[:named]``, the last block first, and of so many private blocks."""
        self.private -= private
        self.free += private
        referenced, idle = self._referenced, self._idle
        for run, _, blocks in reversed(chain.cut(0, named)):
            remaining = referenced.drop(run, blocks)
            if remaining < blocks:
                idle.use(run, remaining, blocks)

    def drop_idle(self) -> Stretches | None:
        """Forget all blocks that no request holds; returns their names, the one idle for longest first."""
        count = self._idle.total
        self.free += count
        return self._evict(count) if count else None

    def _evict(self, count: int) -> Stretches:
        evicted = self._idle.pop(count)
        cached = self._cached
        for run, start, _ in evicted:
            if start:
                cached[run] = start
            else:
                del cached[run]
        return Stretches(evicted)

    def snapshot(self) -> Snapshot:
        """Return the state as plain data."""
        return {
            "free": self.free,
            "private": self.private,
            "held": self._referenced.snapshot(),
            "idle": self._idle.snapshot(),
        }

    def restore(self, state: Snapshot) -> None:
        """Become what `snapshot` wrote."""
        self.free = state["free"]
        self.private = state["private"]
        self._referenced.restore(state["held"])
        self._idle.restore(state["idle"])
        self._cached = dict(self._referenced.reach)
        for run, _, end, _ in self._idle.stretches():
            self._cached[run] = max(end, self._cached.get(run, 0))

    def check(self, holders: dict[int, int], private: int) -> None:
        """Compare with a recount.

        Args:
            holders: requests that hold each named block.
            private: private blocks of all requests.
        Raises:
            InvariantError: a block is lost or counted twice.
        """
        self._referenced.check()
        self._idle.check()
        if self.free + self.private + self.cached != self.blocks:
            raise InvariantError(
                f"{self.free} free + {self.private} private + {self._referenced.total} held + "
                f"{self._idle.total} idle blocks are not {self.blocks}"
            )
        if self.private != private:
            raise InvariantError(f"{self.private} private blocks, but requests have {private}")
        if self._referenced.counts() != holders:
            raise InvariantError("reference counts of named blocks differ from what requests hold")
        if sum(self._cached.values()) != self.cached or self.free < 0 or self.private < 0:
            raise InvariantError(f"{self.free} free, {self.private} private blocks, {self.cached} cached")
