"""Approximate KV index for engines without KV events: guesses what each target holds from where requests went.

A placement counts for ``ttl``: the target is taken to hold all full blocks of the prompt. The same class with a
short ttl predicts beside the exact index, so that a burst of siblings goes together before the first event is back.

Held blocks are closed under prefixes by construction: a placement refreshes every block of its prompt, and within
one placement the last block is the first to go. So a target's depth can be found by bisection. Blocks of one time lie
in *stretches*: a prompt that comes again refreshes a few of these and not each of its blocks.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import Target
from penstock.router.kv_index.index_states import HistoryState
from penstock.router.kv_index.indexer import Column, named
from penstock.router.kv_index.worker_bitmap import BitLedger, WorkerBits, bits, mask_bytes, mask_of

KEEP = 0.8
"""Share of the bound that pruning leaves, so that it is rare."""
_NEVER = 1 << 63
_STEP = 512
"""Blocks of removed targets that one call clears away."""


@dataclass(slots=True)
class _Stretch:
    """Blocks of a chain, one behind the other, that one placement was the last to use; ``until``: end of their time."""

    until: Nanos
    blocks: list[int]


class Kept:
    """The blocks that one target holds, as stretches. Iterating gives these, the first to go first."""

    def __init__(self) -> None:
        self.blocks = 0
        self._order: OrderedDict[int, _Stretch] = OrderedDict()
        """By a number of no meaning: by time, and deepest first within a placement."""
        self._place: dict[int, int] = {}
        """First block of a stretch -> its number."""
        self._numbered = 0

    def __iter__(self) -> Iterator[_Stretch]:
        return iter(self._order.values())

    def __len__(self) -> int:
        return len(self._order)

    @property
    def first(self) -> _Stretch:
        """The stretch that goes first, from its end."""
        return next(iter(self._order.values()))

    def use(self, blocks: Sequence[int], until: Nanos) -> list[int]:
        """Give a chain's blocks a new time, the latest; return those of them that were not held.

        Cost: O(log n) for each stretch on the way, and a copy of what was not held.
        """
        at, on_the_way = 0, []
        while at < len(blocks) and (number := self._place.get(blocks[at])) is not None:
            number, stretch = self._parted(number, blocks, at)
            stretch.until = until
            on_the_way.append(number)
            at += len(stretch.blocks)
        fresh = list(blocks[at:])
        if fresh:
            self.append(_Stretch(until, fresh))
        for number in reversed(on_the_way):  # later blocks go first, so they stand first
            self._order.move_to_end(number)
        return fresh

    def append(self, stretch: _Stretch) -> None:
        """Add blocks that are not held, to go last."""
        self.blocks += len(stretch.blocks)
        self._number(stretch)

    def pop(self) -> _Stretch:
        """Take the stretch that goes first."""
        _, stretch = self._order.popitem(last=False)
        del self._place[stretch.blocks[0]]
        self.blocks -= len(stretch.blocks)
        return stretch

    def shorten(self, count: int) -> list[int]:
        """Take up to so many blocks from the end of the stretch that goes first."""
        stretch = self.first
        if count >= len(stretch.blocks):
            return self.pop().blocks
        taken = stretch.blocks[-count:]
        del stretch.blocks[-count:]
        self.blocks -= count
        return taken

    def _number(self, stretch: _Stretch) -> int:
        number = self._numbered = self._numbered + 1
        self._order[number] = stretch
        self._place[stretch.blocks[0]] = number
        return number

    def _parted(self, number: int, blocks: Sequence[int], at: int) -> tuple[int, _Stretch]:
        """Return a stretch that a chain enters at a place; what the chain does not follow becomes one of its own."""
        stretch = self._order[number]
        held = stretch.blocks
        # Hashes are chained: where one block is the same, all before it are.
        low, high = 1, min(len(held), len(blocks) - at)
        if held[high - 1] == blocks[at + high - 1]:
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            if held[middle - 1] == blocks[at + middle - 1]:
                low = middle
            else:
                high = middle - 1
        if low == len(held):
            return number, stretch
        # The rest keeps its place in the order.
        stretch.blocks = held[low:]
        self._place[held[low]] = number
        used = _Stretch(stretch.until, held[:low])
        return self._number(used), used

    def check(self) -> None:
        """Raise `InvariantError` where stretches are miscounted, out of order or can't be found."""
        times = [stretch.until for stretch in self]
        places = {stretch.blocks[0]: number for number, stretch in self._order.items() if stretch.blocks}
        if times != sorted(times) or places != self._place or len(places) != len(times):
            raise InvariantError(f"stretches out of order or lost: {times}, {places}, {self._place}")
        if self.blocks != sum(len(stretch.blocks) for stretch in self):
            raise InvariantError(f"{self.blocks} blocks are counted, not those of the stretches")


class ApproximateIndex:
    """An index fed by our own decisions.

    Args:
        ttl: kernel nanoseconds that a placement counts for.
        blocks_max: most (target, block) pairs; beyond it the oldest placements go, each from its end, down to 80 %.
    """

    def __init__(self, *, ttl: Nanos, blocks_max: int = 1 << 20) -> None:
        self.ttl = ttl
        self.blocks_max = blocks_max
        self.expired = 0
        """Pairs forgotten because their time was over."""
        self.pruned = 0
        """Pairs forgotten to stay within the bound."""
        self._ledger = BitLedger()
        self._slots = WorkerBits(self._ledger)
        self._masks: dict[int, int] = {}
        self._until: dict[int, Kept] = {}
        """By slot."""
        self._due: list[tuple[Nanos, int]] = []
        """A heap with one entry per slot that holds something: no block of it expires earlier."""
        self._gone: deque[tuple[int, Kept]] = deque()
        self._now: Nanos = 0

    def __len__(self) -> int:
        return self._ledger.total

    def routed(self, target: Target, blocks: Sequence[int], now: Nanos) -> None:
        """Remember that a prompt with these chained hashes goes to a target.

        Cost: some 0.1 us per block that it did not hold, and what expired or is too much by then.
        """
        self._advance(now)
        bit = self._slots.join(target)
        slot = bit.bit_length() - 1
        kept = self._until.setdefault(slot, Kept())
        until = self._now + self.ttl
        if not kept and blocks:
            heappush(self._due, (until, slot))
        fresh = kept.use(blocks, until)
        self._ledger.add(slot, len(fresh))
        masks = self._masks
        find = masks.get
        for block in fresh:
            masks[block] = find(block, 0) | bit
        if self._ledger.total > self.blocks_max:
            self._prune()

    def overlap(
        self, blocks: Sequence[int], now: Nanos = 0, targets: Iterable[Target] | None = None
    ) -> dict[Target, int]:
        """Return how many leading blocks each target probably holds; targets that hold none are absent.

        Cost: O(log n) per distinct depth.
        """
        self._advance(now)
        wanted = self._slots.alive
        if targets is not None:
            wanted = 0
            for target in targets:
                wanted |= self._slots.bit(target)
        found: dict[Target, int] = {}
        for depth, mask in self._ends(blocks, wanted):
            found.update(dict.fromkeys(named(mask, self._slots.names), depth))
        return found

    def column(self, blocks: Sequence[int], place: Mapping[Target, int], now: Nanos) -> Column | None:
        """Return the same for many targets; see `penstock.router.kv_index.indexer.HistoryIndexer.column`."""
        self._advance(now)
        ends = self._ends(blocks, self._slots.alive)
        return self._slots.column(ends, place) if ends else None

    def _ends(self, blocks: Sequence[int], wanted: int) -> list[tuple[int, int]]:
        """Return (leading blocks, mask of the targets that hold just so many), rising."""
        found: list[tuple[int, int]] = []
        find = self._masks.get
        low, rest = 0, (find(blocks[0], 0) & wanted) if blocks else 0
        while rest:
            # All of `rest` hold block `low`. Gallop, then bisect, for the last block that they all hold.
            step, high = 1, len(blocks)
            while low + step < high:
                if find(blocks[low + step], 0) & rest == rest:
                    low += step
                    step *= 2
                else:
                    high = low + step
            while high - low > 1:
                middle = (low + high) // 2
                if find(blocks[middle], 0) & rest == rest:
                    low = middle
                else:
                    high = middle
            onwards = find(blocks[high], 0) & rest if high < len(blocks) else 0
            if ending := rest & ~onwards:
                found.append((high, ending))
            low, rest = high, onwards
        return found

    def clear(self, target: Target) -> None:
        """A target's cache is empty, or it is gone: constant time, the rest is cleared in steps."""
        bit, had = self._slots.leave(target)
        kept = self._until.pop(bit.bit_length() - 1, None) if bit else None
        if had and kept is not None:
            self._gone.append((bit.bit_length() - 1, kept))

    def remove(self, target: Target) -> None:
        """A target is gone."""
        self.clear(target)

    def _advance(self, now: Nanos) -> None:
        """Forget what expired, and a bounded part of what is left of targets that are gone."""
        self._now = max(self._now, now)
        while self._due and self._due[0][0] <= self._now:
            _, slot = heappop(self._due)
            kept = self._until.get(slot)
            if kept is None:
                continue
            self._expire(slot, kept)
            if kept:
                heappush(self._due, (kept.first.until, slot))
        if self._gone:
            slot, kept = self._gone[0]
            left = _STEP
            while kept and left:
                blocks = kept.shorten(left)
                self._unmark(slot, blocks)
                left -= len(blocks)
            if not kept:
                self._gone.popleft()
        while not self._gone and self._slots.sweep_due:
            self._slots.sweep_done()

    def _prune(self) -> None:
        """Forget the oldest until the bound is kept with some room."""
        goal = int(self.blocks_max * KEEP)
        # Of one age, by name: a slot's number depends on which targets came and went before.
        names = self._slots.names
        oldest = [(kept.first.until, names[slot], slot) for slot, kept in self._until.items() if kept]
        heapify(oldest)
        while self._ledger.total > goal:
            _, name, slot = oldest[0]
            kept = self._until[slot]
            blocks = kept.shorten(self._ledger.total - goal)
            self._forgotten(slot, blocks)
            self.pruned += len(blocks)
            heapreplace(oldest, (kept.first.until if kept else _NEVER, name, slot))

    def _expire(self, slot: int, kept: Kept) -> None:
        """Forget a slot's expired blocks."""
        while kept and kept.first.until <= self._now:
            blocks = kept.pop().blocks
            self._forgotten(slot, blocks)
            self.expired += len(blocks)

    def _forgotten(self, slot: int, blocks: Sequence[int]) -> None:
        self._unmark(slot, blocks)
        self._ledger.add(slot, -len(blocks))

    def _unmark(self, slot: int, blocks: Sequence[int]) -> None:
        masks, others = self._masks, ~(1 << slot)
        for block in blocks:
            mask = masks.get(block, 0) & others
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)  # two blocks may have one hash, which is forgotten with the first of them

    def snapshot(self) -> HistoryState:
        """Return the state."""
        return HistoryState(
            now=self._now,
            slots=self._slots.snapshot(),
            masks={block: mask_bytes(mask) for block, mask in self._masks.items()},
            due=self._due,
            slot_blocks={slot: _stretches_written(kept) for slot, kept in self._until.items()},
            leftovers=[(slot, _stretches_written(kept)) for slot, kept in self._gone],
            expired=self.expired,
            pruned=self.pruned,
        )

    def restore(self, plain: Any) -> None:
        """Become the index of a state, or of one as plain data."""
        state = msgspec.convert(plain, HistoryState)
        self._now, self._due = state.now, state.due
        self._slots.restore(state.slots)
        self._masks = {block: mask_of(mask) for block, mask in state.masks.items()}
        self._until = {slot: _stretches_restored(pairs) for slot, pairs in state.slot_blocks.items()}
        self._gone = deque((slot, _stretches_restored(pairs)) for slot, pairs in state.leftovers)
        self.expired, self.pruned = state.expired, state.pruned

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: walks everything."""
        self._slots.check()
        marks: dict[int, int] = {}
        for slot, kept in [*self._until.items(), *self._gone]:
            kept.check()
            for block in (block for stretch in kept for block in stretch.blocks):
                marks[block] = marks.get(block, 0) | 1 << slot
        if marks != self._masks:
            raise InvariantError("the marks on blocks are not those of the targets that hold them")
        for slot, kept in self._until.items():
            if self._ledger.pairs[slot] != kept.blocks:
                raise InvariantError(f"slot {slot} is miscounted")
        for mask in self._masks.values():
            if not mask or any(slot >= len(self._slots.names) for slot in bits(mask)):
                raise InvariantError("a block is marked for nobody")


def _stretches_written(kept: Kept) -> list[tuple[Nanos, list[int]]]:
    return [(stretch.until, stretch.blocks) for stretch in kept]


def _stretches_restored(pairs: Sequence[tuple[Nanos, list[int]]]) -> Kept:
    kept = Kept()
    for until, blocks in pairs:
        kept.append(_Stretch(until, blocks))
    return kept
