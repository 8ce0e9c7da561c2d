"""Holders of the KV blocks of one tier: a flat map from chained block hash to a worker bit mask.

The map is flat, and the mask is stored once per *span*: a stretch of one chain whose blocks the same workers hold.

    by_hash: block hash -> span number          spans[number]: hashes[], mask, parent

Blocks arrive, are shared and go in stretches, so one mask serves some hundred blocks, a look-up steps from span to
span instead of from block to block, and a worker that takes over a whole stretch costs one ``|=``. Where workers
come to differ, a span is cut. Nothing assumes that a worker holds a block's parents: a look-up meets every span on
its way, so a hole left by an out-of-order removal is a span without that worker's bit, and the answer stays exact.

Look-ups enter a span at its head and evictions at its end, so only these two are in the map at first; the inner
blocks are *filed* there when one of them is looked up by itself. This relies on their following each other in one
chain; `penstock.router.kv_index.engine_hash_map` makes it so, and targets that announce our own hashes are trusted.

The maps' keys are the low 60 bits of a hash; the spans keep all 64, and two hashes that agree in 60 bits but not in
64 are refused and counted, never mixed up.
"""

from array import array
from collections.abc import Sequence
from itertools import repeat

from penstock.kernel.errors import InvariantError
from penstock.router.kv_index.indexer import IndexCounters
from penstock.router.kv_index.span_table import KEY, SPAN_MAX, Span, SpanTable, agreement, keys_of, position_in
from penstock.router.kv_index.worker_bitmap import BitLedger, bits

_ANCESTORS = 8
"""Spans towards the root that a new block keeps fresh, so that the oldest to go are not its own prefix."""


class Spans(SpanTable):
    """The holders of one tier's blocks. Workers are bits; ``alive`` are the bits that count.

    ``ledger`` (shared by all tiers) counts the (worker, block) pairs of each bit and is kept up to date here.
    """

    def __init__(self, counters: IndexCounters, ledger: BitLedger, *, lazy: bool) -> None:
        super().__init__(lazy)
        self.counters = counters
        self.ledger = ledger

    def holds(self, bit: int, block: int) -> bool:
        """Tell whether a worker holds one block."""
        found = self.where(block, bit)
        return found is not None and bool(self.span(found[0]).mask & self.alive & bit)

    # --- stored -----------------------------------------------------------------------------------------------------

    def store(
        self, bit: int, hashes: "array[int]", parent: int | None, engine: "array[int] | None" = None
    ) -> list[tuple[int, int]]:
        """Let the worker ``bit`` hold ``hashes``, consecutive blocks of one chain that follow ``parent``.

        Returns: the [low, high) ranges of the event whose ``engine`` hashes are not (only) known under the spans
            that now hold them, for the caller to sort out.
        """
        unhashed_blocks: list[tuple[int, int]] = []
        count, i = len(hashes), 0
        tail = self._ending_in(parent)
        touched: list[int] = []
        while i < count:
            number = self.by_hash.get(hashes[i] & KEY)
            if number is None and i == 0 and parent is not None and self.blocks_unfiled:
                number = self._inside(bit, hashes[0], parent)
            if number is not None and not self._clean(number).mask:
                self._drop(number)  # left behind by workers that are gone
                number = None
            if number is None:
                number, taken, clean = self._add(bit, hashes, engine, i, parent, tail)
                tail = number
            else:
                span = self.span(number)
                position = position_in(span.hashes, hashes[i])
                if position < 0:
                    self.counters.collisions += 1
                    break  # what follows can't be reached without this block
                taken = agreement(span.hashes, position, hashes, i)
                if engine is None:
                    clean = True
                else:
                    known = span.engine
                    clean = (
                        not span.odd
                        and known is not None
                        and known[position : position + taken] == engine[i : i + taken]
                    )
                    if not clean:
                        self._file(number)  # an alias leads to each block by itself
                number = self._add_holder(number, position, position + taken, bit, tail)
                tail = number
            if not clean:
                unhashed_blocks.append((i, i + taken))
            touched.append(number)
            i += taken
            parent = hashes[i - 1]
        self._touch(touched)
        return unhashed_blocks

    def _inside(self, bit: int, block: int, parent: int) -> int | None:
        """Return the span that has a block inside which is not filed. Only the first of an event can be such a one:

        a span that has a later one has either the block before it too, or begins with it and is found by that.
        """
        place = self.where(parent, bit)
        if place is None:
            place = self.where_all(block)
            return None if place is None else place[0]
        number, position = place
        hashes = self.span(number).hashes
        return number if position + 1 < len(hashes) and hashes[position + 1] == block else None

    def _add(
        self,
        bit: int,
        hashes: "array[int]",
        engine: "array[int] | None",
        start: int,
        parent: int | None,
        tail: int | None,
    ) -> tuple[int, int, bool]:
        """Take in blocks without a holder: extend the span before them, or begin one. Return (span, count, clean)."""
        previous = None if tail is None else self.span(tail)
        grows = (
            tail is not None
            and previous is not None
            and previous.mask == bit
            and previous.hashes[-1] == parent
            and (previous.engine is None) == (engine is None)
            and len(previous.hashes) < SPAN_MAX
        )
        room = SPAN_MAX - len(previous.hashes) if grows and previous is not None else SPAN_MAX
        new = hashes[start : start + room]
        number = tail if grows and tail is not None else self._number()
        keys = keys_of(new)
        names = None if engine is None else engine[start : start + len(new)]
        if self.lazy and (not grows or not previous or not previous.filed) and self._are_fresh(keys, names):
            number, taken = self._add_unfiled(bit, new, names, keys, parent, number, previous if grows else None)
            return number, taken, True
        if grows and tail is not None:
            self._file(tail)
        before = len(self.by_hash)
        # One pass in C: sets what is absent, and returns what was there.
        got = list(map(self.by_hash.setdefault, keys, repeat(number)))
        if len(self.by_hash) - before != len(new):
            # In a variable, for mypyc works out a slice's bounds twice.
            own = self._undo_foreign(got, keys, number, previous if grows else None, new)
            new = new[:own]
        clean = True
        if names is not None:
            names = names[: len(new)]
            before = len(self.by_engine)
            for key in keys_of(names):
                self.by_engine.setdefault(key, number)
            clean = len(self.by_engine) - before == len(names)
        if grows and previous is not None:
            previous.hashes.extend(new)
            if names is not None and previous.engine is not None:
                previous.engine.extend(names)
                previous.odd |= not clean
        else:
            span = Span(new, names, bit, parent)
            span.odd = not clean
            self.spans[number] = span
            self.filed[number] = None
            self.age[number] = None
        self.blocks += len(new)
        self._count(bit, len(new))
        self.counters.stored += len(new)
        return number, len(new), clean

    def _are_fresh(self, keys: list[int], names: "array[int] | None") -> bool:
        """Tell whether no block comes twice, and no name comes twice or leads elsewhere."""
        if len(set(keys)) != len(keys):
            return False
        if names is None:
            return True
        named = keys_of(names)
        return len(set(named)) == len(named) and self.by_engine.keys().isdisjoint(named)

    def _add_unfiled(
        self,
        bit: int,
        new: "array[int]",
        names: "array[int] | None",
        keys: list[int],
        parent: int | None,
        number: int,
        previous: Span | None,
    ) -> tuple[int, int]:
        """Take in blocks without a holder and file only the ends of their span. Return (span, count)."""
        by_hash, by_engine = self.by_hash, self.by_engine
        if not by_hash.keys().isdisjoint(keys):
            own = next(i for i, key in enumerate(keys) if key in by_hash)
            new = new[:own]
            names = None if names is None else names[: len(new)]
        if names is not None:
            if previous is None:
                by_engine[names[0] & KEY] = number
            elif previous.engine is not None:
                if len(previous.engine) > 1:
                    by_engine.pop(previous.engine[-1] & KEY, None)
                previous.engine.extend(names)
            by_engine[names[-1] & KEY] = number
        if previous is None:
            span = self.spans[number] = Span(new, names, bit, parent)
            span.filed = False
            self.age[number] = None
            self._note_unfiled(number, bit)
            by_hash[new[0] & KEY] = number
        else:
            if len(previous.hashes) > 1:
                del by_hash[previous.hashes[-1] & KEY]
            previous.hashes.extend(new)
        by_hash[new[-1] & KEY] = number
        self.blocks += len(new)
        self.blocks_unfiled += len(new)
        self._count(bit, len(new))
        self.counters.stored += len(new)
        return number, len(new)

    def _undo_foreign(self, got: list[int], keys: list[int], number: int, grown: Span | None, new: "array[int]") -> int:
        """Some of an event's blocks were known or came twice: keep those before the first such one. Return how many."""
        seen = set() if grown is None else {block & KEY for block in grown.hashes}
        keep: int | None = None
        for i, (owner, key) in enumerate(zip(got, keys, strict=True)):
            repeated = key in seen
            seen.add(key)
            if keep is None and (owner != number or repeated):
                keep = i
            if keep is not None and owner == number and not repeated:
                del self.by_hash[key]
        assert keep is not None
        if keep == 0:
            raise InvariantError("a block that was absent a moment ago is present")
        return keep

    def _add_holder(self, number: int, low: int, high: int, bit: int, tail: int | None) -> int:
        """Add a holder to blocks [low, high) of a span. Return the span that holds the last of them."""
        span = self._clean(number)
        if span.mask & bit:
            self.counters.duplicates += high - low
            self.copies.again(bit, span.hashes[low:high])
            return number
        self._count(bit, high - low)
        self.counters.stored += high - low
        if low == 0 and high == len(span.hashes):
            span.mask |= bit
            if not span.filed:
                self._note_unfiled(number, bit)
            return number
        mask = span.mask | bit
        if low == 0 and tail is not None and self._joins(tail, number, mask, high):
            self._move_front(number, high, tail)
            return tail
        if high < len(span.hashes):
            number, _ = self._cut(number, high)
        if low:
            _, number = self._cut(number, low)
        self.span(number).mask = mask
        return number

    # --- removed ----------------------------------------------------------------------------------------------------

    def take_copies(self, bit: int, names: "array[int]", *, by_engine: bool) -> "array[int]":
        """Remove one copy of each block that has several copies; return the names of the other blocks."""
        if not self.copies.of(bit):
            return names
        last = array("Q")
        for name in names:
            place = self.where_engine(bit, name) if by_engine else self.where(name, bit)
            if place is None or not self.copies.take(bit, self.block_at(place)):
                last.append(name)
        self.counters.copies_removed += len(names) - len(last)
        return last

    def remove(self, bit: int, hashes: Sequence[int], *, by_engine: bool = False) -> None:
        """Let the worker ``bit`` hold these blocks no longer; unknown ones are counted.

        Engines evict leaf first, so the hashes mostly are a stretch backwards; either direction goes at once.
        """
        wanted = array("Q", hashes)
        backwards = wanted[::-1]
        count, i = len(wanted), 0
        aliases = self.aliases.get(bit) if by_engine else None
        while i < count:
            place = self.where_engine(bit, wanted[i]) if by_engine else self.where(wanted[i], bit)
            span = None if place is None else self._clean(place[0])
            if place is None or span is None or not span.mask & bit:
                self.counters.removed_unknown += 1
                if aliases is not None:
                    aliases.pop(wanted[i], None)
                i += 1
                continue
            number, position = place
            low, high = position, position + 1
            column = span.engine if by_engine else span.hashes
            if aliases:
                # This worker's hashes mean something else than the span says of them: one by one.
                aliases.pop(wanted[i], None)
            elif column is not None and not (by_engine and span.odd):
                back = min(position + 1, count - i)
                if back > 1 and column[position + 1 - back : position + 1] == backwards[count - i - back : count - i]:
                    low = position + 1 - back
                else:
                    while low and i + high - low < count and column[low - 1] == wanted[i + high - low]:
                        low -= 1
                    if high - low == 1:
                        high = position + agreement(column, position, wanted, i)
            if high < len(span.hashes):
                self.counters.holes += 1
            self._release(number, low, high, bit)
            i += high - low

    def _release(self, number: int, low: int, high: int, bit: int) -> None:
        """Take a holder off blocks [low, high) of a span; the last holder takes the blocks with it."""
        span = self.span(number)
        length = len(span.hashes)
        self.copies.drop(bit, span.hashes[low:high])
        self._count(bit, low - high)
        self.counters.removed += high - low
        rest = span.mask & ~bit
        if not rest:
            if high == length:
                self._shorten(number, low)
                return
            number, _ = self._cut(number, high)
            self._shorten(number, low)
            return
        if low == 0 and high == length:
            span.mask = rest
            if not span.filed:
                del self.unfiled[bit.bit_length() - 1][number]
            self.released = number
            return
        after = self.released
        if high == length and self._follows(after, number, rest, length - low):
            self._move_back(number, low, after)
            return
        if high < length:
            number, _ = self._cut(number, high)
        if low:
            _, number = self._cut(number, low)
        self.span(number).mask = rest
        self.released = number

    # --- memory -----------------------------------------------------------------------------------------------------

    def evict_oldest(self) -> bool:
        """Drop the span that was stored to the longest ago; return False where none is left."""
        if not self.age:
            return False
        number = next(iter(self.age))
        span = self._clean(number)
        length = len(span.hashes)
        for slot in bits(span.mask):
            self._count(1 << slot, -length)
            self.copies.drop(1 << slot, span.hashes)
        self.counters.evicted += span.mask.bit_count() * length
        self._drop(number)
        return True

    def sweep(self, budget: int) -> bool:
        """Take dead bits off the next spans, some ``budget`` spans and blocks of work; return True at the end.

        A span that no living worker holds is dropped from its end, so that one step stays bounded.
        """
        while budget > 0:
            if self.cursor >= len(self.spans):
                self.cursor = 0
                return True
            span = self.spans[self.cursor]
            budget -= 1
            if span is None or self._clean(self.cursor).mask:
                self.cursor += 1
                continue
            keep = max(0, len(span.hashes) - budget - 1)
            budget -= len(span.hashes) - keep
            self._shorten(self.cursor, keep)
        return False

    def forget(self, bit: int) -> None:
        """Drop what is kept for one worker beside its bit."""
        self.counts.pop(bit, None)
        self.aliases.pop(bit, None)
        self.copies.forget(bit)
        self.unfiled.pop(bit.bit_length() - 1, None)

    def _touch(self, numbers: list[int]) -> None:
        """Mark spans as fresh, the deepest first and some ancestors last, so that a chain ages from its end."""
        age = self.age
        for number in reversed(numbers):
            age.move_to_end(number)
        parent = self.span(numbers[0]).parent if numbers else None
        for _ in range(_ANCESTORS):
            before = None if parent is None else self.by_hash.get(parent & KEY)
            if before is None:
                return
            age.move_to_end(before)
            parent = self.span(before).parent

    def _count(self, bit: int, blocks: int) -> None:
        self.counts[bit] += blocks
        self.ledger.add(bit.bit_length() - 1, blocks)
