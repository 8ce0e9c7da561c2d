"""Approximate KV index for engines without KV events: guesses what each target holds from where requests went.

A placement counts for ``ttl``: the target is taken to hold all full blocks of the prompt. The same class with a
short ttl predicts beside the exact index, so that a burst of siblings goes together before the first event is back.

Held blocks are closed under prefixes by construction: a placement refreshes every block of its prompt, and within
one placement the last block is the first to go. So a target's depth can be found by bisection.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos, Snapshot
from penstock.kernel.values import Target
from penstock.router.kv_index.indexer import Column, named
from penstock.router.kv_index.prefix_depth import depth_of
from penstock.router.kv_index.spans.span_state import from_bytes, mask_bytes
from penstock.router.kv_index.worker_bitmap import BitLedger, WorkerBits, bits

KEEP = 0.8
"""Share of the bound that pruning leaves, so that it is rare."""
_NEVER = 1 << 63
_STEP = 512
"""Blocks of removed targets that one call clears away."""


Kept = OrderedDict[int, Nanos]
"""Block -> end of its time."""


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
        """Per slot; the first to go stand first: by time, and deepest first within a placement."""
        self._due: list[tuple[Nanos, int]] = []
        """A heap with one entry per slot that holds something: no block of it expires earlier."""
        self._gone: deque[tuple[int, Kept]] = deque()
        self._now: Nanos = 0

    def __len__(self) -> int:
        return self._ledger.total

    def routed(self, target: Target, blocks: Sequence[int], now: Nanos) -> None:
        """Remember that a prompt with these chained hashes goes to a target.

        Cost: some 0.2 us per block, and what expired or is too much by then.
        """
        self._advance(now)
        bit = self._slots.join(target)
        slot = bit.bit_length() - 1
        kept = self._until.setdefault(slot, OrderedDict())
        before = len(kept)
        until = self._now + self.ttl
        if not before and blocks:
            heappush(self._due, (until, slot))
        depth = depth_of(blocks, kept)
        fresh = blocks[depth:]
        # Later blocks go first, so they stand first.
        kept.update(dict.fromkeys(reversed(fresh), until))
        for block in reversed(blocks[:depth]):
            kept[block] = until
            kept.move_to_end(block)
        self._ledger.add(slot, len(kept) - before)
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

    def column(self, blocks: Sequence[int], place: Mapping[Target, int], now: Nanos) -> Column:
        """Return the same for many targets; see `penstock.router.kv_index.indexer.HistoryIndexer.column`."""
        self._advance(now)
        return self._slots.column(self._ends(blocks, self._slots.alive), place)

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
                heappush(self._due, (kept[next(iter(kept))], slot))
        if self._gone:
            slot, kept = self._gone[0]
            for _ in range(min(_STEP, len(kept))):
                self._unmark(slot, kept.popitem(last=False)[0])
            if not kept:
                self._gone.popleft()
        while not self._gone and self._slots.sweep_due:
            self._slots.sweep_done()

    def _prune(self) -> None:
        """Forget the oldest until the bound is kept with some room."""
        goal = int(self.blocks_max * KEEP)
        # Of one age, by name: a slot's number depends on which targets came and went before.
        names = self._slots.names
        oldest = [(kept[next(iter(kept))], names[slot], slot) for slot, kept in self._until.items() if kept]
        heapify(oldest)
        while self._ledger.total > goal:
            _, name, slot = oldest[0]
            kept = self._until[slot]
            self._forget_first(slot, kept)
            self.pruned += 1
            heapreplace(oldest, (kept[next(iter(kept))] if kept else _NEVER, name, slot))

    def _expire(self, slot: int, kept: Kept) -> None:
        """Forget a slot's expired blocks; all in one loop, since every block that was placed comes by here."""
        masks, others, pop, now = self._masks, ~(1 << slot), kept.popitem, self._now
        before = len(kept)
        while kept:
            block, until = pop(last=False)
            if until > now:
                kept[block] = until
                kept.move_to_end(block, last=False)
                break
            mask = masks[block] & others
            if mask:
                masks[block] = mask
            else:
                del masks[block]
        over = before - len(kept)
        self._ledger.add(slot, -over)
        self.expired += over

    def _forget_first(self, slot: int, kept: Kept) -> None:
        self._unmark(slot, kept.popitem(last=False)[0])
        self._ledger.add(slot, -1)

    def _unmark(self, slot: int, block: int) -> None:
        mask = self._masks[block] & ~(1 << slot)
        if mask:
            self._masks[block] = mask
        else:
            del self._masks[block]

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data."""
        return {
            "now": self._now,
            "slots": self._slots.snapshot(),
            "masks": [[block, mask_bytes(mask)] for block, mask in self._masks.items()],
            "due": [list(entry) for entry in self._due],
            "until": [[slot, list(map(list, kept.items()))] for slot, kept in self._until.items()],
            "gone": [[slot, list(map(list, kept.items()))] for slot, kept in self._gone],
            "expired": self.expired,
            "pruned": self.pruned,
        }

    def restore(self, state: Snapshot) -> None:
        """Become the index that wrote ``state``."""
        self._now = state["now"]
        self._slots.restore(state["slots"])
        self._masks = {block: from_bytes(mask) for block, mask in state["masks"]}
        self._due = [(until, slot) for until, slot in state["due"]]
        self._until = {slot: _kept(pairs) for slot, pairs in state["until"]}
        self._gone = deque((slot, _kept(pairs)) for slot, pairs in state["gone"])
        self.expired, self.pruned = state["expired"], state["pruned"]

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: walks everything."""
        self._slots.check()
        marks: dict[int, int] = {}
        for slot, kept in [*self._until.items(), *self._gone]:
            for block in kept:
                marks[block] = marks.get(block, 0) | 1 << slot
        if marks != self._masks:
            raise InvariantError("the marks on blocks are not those of the targets that hold them")
        for slot, kept in self._until.items():
            if self._ledger.pairs[slot] != len(kept) or list(kept.values()) != sorted(kept.values()):
                raise InvariantError(f"slot {slot} is miscounted or out of order")
        for mask in self._masks.values():
            if not mask or any(slot >= len(self._slots.names) for slot in bits(mask)):
                raise InvariantError("a block is marked for nobody")


def _kept(pairs: list[list[int]]) -> Kept:
    return OrderedDict((block, until) for block, until in pairs)
