"""Runs of KV blocks: names for the blocks of many prompts, where most blocks always come together.

A run is a stretch of blocks that appeared together and can be entered only at its beginning. A holder of one block of
a run therefore holds all blocks before it: what it holds of the run is a number. A prompt is a few (run, blocks) pairs
instead of a hundred hashes, and every question about its blocks is answered from the pairs.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, overload

from penstock.kernel.errors import InvariantError

RUN_BITS = 20
"""Block i of run r has the name ``r << RUN_BITS | i``."""
RUN_MAX = 1 << RUN_BITS
"""Blocks of the longest run."""

Stretch = tuple[int, int, int]
"""(run, from, to): blocks ``from`` to ``to - 1`` of a run."""


class _Names(Sequence[int]):
    """A short form of a sequence of names, equal to any sequence of the same names."""

    __slots__ = ("parts",)

    parts: Sequence[tuple[int, ...]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.parts)!r})"


class Stretches(_Names):
    """Names of blocks, kept as stretches of runs; as a sequence it has every single name.

    Args:
        parts: in order; none is empty.
    """

    __slots__ = ()

    parts: Sequence[Stretch]

    def __init__(self, parts: Sequence[Stretch]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(end - start for _, start, end in self.parts)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(
            [range((run << RUN_BITS) + start, (run << RUN_BITS) + end) for run, start, end in self.parts]
        )

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]


class Chain(_Names):
    """The blocks of a prompt: each part is the beginning of a run.

    Args:
        parts: (run, how many of its blocks), none empty.
    """

    __slots__ = ("_length",)

    parts: Sequence[tuple[int, int]]

    def __init__(self, parts: Sequence[tuple[int, int]] = ()) -> None:
        self.parts = parts
        self._length = sum([count for _, count in parts])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable([range(run << RUN_BITS, (run << RUN_BITS) + count) for run, count in self.parts])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        at = index if index >= 0 else index + self._length
        for run, count in self.parts:
            if 0 <= at < count:
                return run << RUN_BITS | at
            at -= count
        raise IndexError(f"block {index} of a chain of {self._length}")

    def ranges(self) -> list[tuple[int, int]]:
        """Return the names as (first, how many that follow it). Cost: O(parts)."""
        return [(run << RUN_BITS, count) for run, count in self.parts]

    def cut(self, start: int, end: int) -> list[Stretch]:
        """Return blocks ``start`` to ``end - 1`` of the chain as stretches. Cost: O(parts)."""
        found: list[Stretch] = []
        at = 0
        for run, count in self.parts:
            if at >= end:
                break
            low = start - at if start > at else 0
            high = count if at + count <= end else end - at
            if low < high:
                found.append((run, low, high))
            at += count
        return found


def chain_of(names: Sequence[int]) -> Chain:
    """Return the chain that has these names: the inverse of ``list(chain)``.

    Raises:
        ValueError: they are not beginnings of runs, one after the other.
    """
    parts: list[tuple[int, int]] = []
    for name in names:
        run, block = name >> RUN_BITS, name & (RUN_MAX - 1)
        if block == 0:
            parts.append((run, 1))
        elif parts and parts[-1] == (run, block):
            parts[-1] = (run, block + 1)
        else:
            raise ValueError(f"block {block} of run {run} does not follow what is before it")
    return Chain(parts)


def stretches_of(names: Sequence[int]) -> Sequence[Stretch]:
    """Return names as stretches, rising or falling ones."""
    if isinstance(names, Stretches):
        return names.parts
    found: list[Stretch] = []
    for name in names:
        run, block = name >> RUN_BITS, name & (RUN_MAX - 1)
        last = found[-1] if found else (-1, 0, 0)
        if last[0] == run and last[2] == block:
            found[-1] = (run, last[1], block + 1)
        elif last[0] == run and last[1] == block + 1:
            found[-1] = (run, block, last[2])
        else:
            found.append((run, block, block + 1))
    return found


class Holders:
    """How far each run is held, and by how many holders; each holds a beginning of the run."""

    __slots__ = ("_several", "reach", "total")

    def __init__(self) -> None:
        self.total = 0
        """Blocks that have a holder, each counted once."""
        self.reach: dict[int, int] = {}
        """run -> blocks of it that have a holder; at least 1"""
        self._several: dict[int, list[int]] = {}
        """run -> blocks that each holder holds, of runs with more than one holder."""

    def add(self, run: int, blocks: int) -> int:
        """Add a holder of the first ``blocks`` (1 or more) of a run; return how many were held before."""
        before = self.reach.get(run, 0)
        if not before:
            self.reach[run] = blocks
            self.total += blocks
            return 0
        several = self._several.get(run)
        if several is None:
            self._several[run] = [before, blocks]
        else:
            several.append(blocks)
        if blocks > before:
            self.reach[run] = blocks
            self.total += blocks - before
        return before

    def drop(self, run: int, blocks: int) -> int:
        """Remove a holder of the first ``blocks`` of a run; return how many are still held."""
        several = self._several.get(run)
        if several is None:
            del self.reach[run]
            self.total -= blocks
            return 0
        several.remove(blocks)
        before = self.reach[run]
        after = before
        if blocks == before:
            after = max(several)
            if after < before:
                self.reach[run] = after
                self.total -= before - after
        if len(several) == 1:
            del self._several[run]
        return after

    def extend(self, run: int, start: int, end: int) -> int:
        """Let a holder of ``start`` blocks (0: none) of a run hold ``end`` now; return how many were held before."""
        if not start:
            return self.add(run, end)
        before = self.reach[run]
        several = self._several.get(run)
        if several is not None:
            several[several.index(start)] = end
        if end > before:
            self.reach[run] = end
            self.total += end - before
        return before

    def counts(self) -> dict[int, int]:
        """Return the number of holders of each block, by name. Cost: walks everything."""
        found: dict[int, int] = {}
        for run, reach in self.reach.items():
            for blocks in self._several.get(run, [reach]):
                for name in range(run << RUN_BITS, (run << RUN_BITS) + blocks):
                    found[name] = found.get(name, 0) + 1
        return found

    def snapshot(self) -> list[list[Any]]:
        """Return the state as plain data."""
        return [[run, self._several.get(run, [reach])] for run, reach in self.reach.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Become what `snapshot` wrote."""
        self.reach = {run: max(several) for run, several in state}
        self._several = {run: list(several) for run, several in state if len(several) > 1}
        self.total = sum(self.reach.values())

    def check(self) -> None:
        """Raise `InvariantError` where the sums are off."""
        if self.total != sum(self.reach.values()) or any(blocks < 1 for blocks in self.reach.values()):
            raise InvariantError(f"{self.total} blocks are said to be held, runs say {sum(self.reach.values())}")
        for run, several in self._several.items():
            if len(several) < 2 or max(several) != self.reach[run]:
                raise InvariantError(f"run {run} is held to {self.reach[run]}, its holders say {several}")


def depth_in(reach: dict[int, int], chain: Chain, limit: int) -> int:
    """Count the leading blocks of ``chain[:limit]`` that ``reach`` (run -> blocks) has. Cost: O(parts)."""
    depth = 0
    for run, count in chain.parts:
        there = reach.get(run, 0)
        if there < count:
            depth += there
            break
        depth += count
        if depth >= limit:
            break
    return depth if depth < limit else limit


class Aged:
    """Stretches of runs in the order in which they were last used; of equal age, and always within a run, the higher
    blocks are older: a user of a block used all before it.
    """

    __slots__ = ("_by_run", "_order", "_serial", "total")

    def __init__(self) -> None:
        self.total = 0
        """Blocks."""
        self._order: OrderedDict[int, list[int]] = OrderedDict()
        """serial -> [run, from, to, stamp, serial], the oldest first"""
        self._by_run: dict[int, list[list[int]]] = {}
        """The stretches of each run, the highest (oldest) first."""
        self._serial = 0

    def __len__(self) -> int:
        return self.total

    def use(self, run: int, start: int, end: int, stamp: int = 0) -> None:
        """Put a stretch that is not here behind all others; it lies below what is here of its run."""
        self._serial = serial = self._serial + 1
        entry = [run, start, end, stamp, serial]
        self._order[serial] = entry
        mine = self._by_run.get(run)
        if mine is None:
            self._by_run[run] = [entry]
        else:
            mine.append(entry)
        self.total += end - start

    def take(self, run: int, end: int) -> None:
        """Take the blocks of a run below ``end`` out."""
        mine = self._by_run.get(run)
        if mine is None:
            return
        while mine:
            entry = mine[-1]
            _, start, stop, _, serial = entry
            if start >= end:
                return
            if stop > end:
                entry[1] = end
                self.total -= end - start
                return
            mine.pop()
            del self._order[serial]
            self.total -= stop - start
        del self._by_run[run]

    def pop(self, count: int) -> list[Stretch]:
        """Take out the ``count`` oldest blocks, which must be there; return them, each stretch from its end."""
        found: list[Stretch] = []
        self.total -= count
        order = self._order
        while count > 0:
            entry = next(iter(order.values()))
            run, start, end, _, serial = entry
            if end - start > count:
                entry[2] = end - count
                found.append((run, end - count, end))
                break
            found.append((run, start, end))
            count -= end - start
            del order[serial]
            mine = self._by_run[run]
            del mine[0]
            if not mine:
                del self._by_run[run]
        return found

    def pop_until(self, stamp: int) -> list[Stretch]:
        """Take out what has this stamp or an older one."""
        count = 0
        for _, start, end, age, _ in self._order.values():
            if age > stamp:
                break
            count += end - start
        return self.pop(count)

    def pop_oldest(self, most: int) -> list[Stretch]:
        """Take out the oldest stretch (there must be one), or ``most`` blocks from its end."""
        _, start, end, _, _ = next(iter(self._order.values()))
        return self.pop(min(end - start, most))

    @property
    def oldest(self) -> int | None:
        """The stamp of the oldest stretch; None where there is none."""
        return next(iter(self._order.values()))[3] if self._order else None

    def stretches(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (run, from, to, stamp), the oldest first."""
        for run, start, end, stamp, _ in self._order.values():
            yield run, start, end, stamp

    def snapshot(self) -> list[list[int]]:
        """Return the state as plain data."""
        return [list(stretch) for stretch in self.stretches()]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Become what `snapshot` wrote."""
        self.__init__()  # type: ignore[misc]
        for run, start, end, stamp in state:
            self.use(run, start, end, stamp)

    def check(self) -> None:
        """Raise `InvariantError` where stretches of a run overlap, are out of order or miscounted."""
        if self.total != sum(end - start for _, start, end, _ in self.stretches()):
            raise InvariantError(f"{self.total} blocks are said to be here, stretches say otherwise")
        for run, mine in self._by_run.items():
            for above, below in pairwise(mine):
                if below[2] > above[1] or below[4] < above[4]:
                    raise InvariantError(f"stretches {mine} of run {run} are out of order")
        if sum(map(len, self._by_run.values())) != len(self._order):
            raise InvariantError("a stretch is listed for no run, or for two")
