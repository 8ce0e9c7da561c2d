"""`SpanTable`: files the blocks of one tier as spans in a flat map, cut and joined where their holders differ.

The part of `penstock.router.kv_index.spans` that moves blocks between spans without changing their holders.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice, repeat

import numpy as np

from penstock.router.kv_index.index_states import CopiesState
from penstock.router.kv_index.worker_bitmap import bits

KEY = (1 << 60) - 1
"""The maps' keys are the low 60 bits of a hash: Python keeps those in 32 bytes, 64 bits in 48."""
SPAN_MAX = 2048
"""Blocks per span: bounds the search for a block inside its span (some 10 us) and the cost of dropping one."""


class Span:
    """A stretch of a chain. ``parent`` is the hash before ``hashes[0]``, None at the root or where it is unknown.

    ``engine``: the engine's own hashes of the same blocks, for workers whose events are translated. ``odd``: some of
    them belong to other blocks too, so each must be looked up by itself. ``filed``: the map leads to every block of
    it; else to its first and its last.
    """

    __slots__ = ("engine", "filed", "hashes", "mask", "odd", "parent")

    def __init__(self, hashes: "array[int]", engine: "array[int] | None", mask: int, parent: int | None) -> None:
        self.hashes = hashes
        self.engine = engine
        self.mask = mask
        self.parent = parent
        self.odd = False
        self.filed = True


def filed_keys(span: Span) -> set[int]:
    """Return the keys under which the map leads to a span."""
    return set(keys_of(span.hashes if span.filed else array("Q", [span.hashes[0], span.hashes[-1]])))


def position_in(hashes: "array[int]", block: int) -> int:
    """Return where a block stands in a span, or -1; the ends are looked at first."""
    if hashes[-1] == block:
        return len(hashes) - 1
    try:
        return hashes.index(block)
    except ValueError:
        return -1


def agreement(span: "array[int]", position: int, event: "array[int]", start: int) -> int:
    """Count how many hashes two sequences share from these places on."""
    most = min(len(span) - position, len(event) - start)
    if span[position : position + most] == event[start : start + most]:
        return most
    same = 0
    while span[position + same] == event[start + same]:
        same += 1
    return same


def keys_of(hashes: "array[int]") -> list[int]:
    """Return the map's keys of a run of hashes: below some 32 a loop is faster than numpy's fixed cost."""
    if len(hashes) < 32:
        return [value & KEY for value in hashes]
    out: list[int] = np.bitwise_and(np.frombuffer(hashes, np.uint64), np.uint64(KEY)).tolist()
    return out


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


_FILED_PER_SEARCH = 16
"""Spans filed beside each search, the oldest first: then no run of searches costs much more than filing all once."""
_SEARCHED_MAX = 1 << 18
"""Blocks of all workers that are searched for one of unknown place: some 0.4 ms."""


class SpanTable:
    """Spans and the maps that lead to them.

    Args:
        lazy: file a span's inner blocks only once one of them is looked up by itself. Look-ups enter a span at its
            head and evictions at its end, so that most spans never need it: a fifth of the time and memory.
    """

    def __init__(self, lazy: bool) -> None:
        self.lazy = lazy
        self.blocks = 0
        self.blocks_unfiled = 0
        self.counts: Counter[int] = Counter()
        """bit -> blocks that this worker holds."""
        self.by_hash: dict[int, int] = {}
        self.by_engine: dict[int, int] = {}
        self.spans: list[Span | None] = []
        self.alive = 0
        """Bits of the workers that count; others are left over from workers that are gone."""
        self.aliases: dict[int, dict[int, int | None]] = {}
        """bit -> engine hash -> our hash, where that differs from ``by_engine``; None: a block we could not place."""
        self.copies = BlockRefcounts()
        self.unfiled: dict[int, dict[int, None]] = {}
        """slot -> numbers of the spans it holds that are not filed, the oldest first."""
        self.filed: dict[int, None] = {}
        """Numbers of the other spans."""
        self.free: list[int] = []
        self.age: OrderedDict[int, None] = OrderedDict()
        """Span numbers, the one stored to the longest ago first."""
        self.released = -1
        self.cursor = 0

    def __len__(self) -> int:
        return self.blocks

    def where(self, block: int, bit: int) -> tuple[int, int] | None:
        """Return (span number, position) of a block, or None where the worker ``bit`` (or any other) does not hold it.

        Cost: one look-up; where the block is not filed, a search of the worker's spans that are not (0.3 us each).
        """
        number = self.by_hash.get(block & KEY)
        if number is not None:
            position = position_in(self.span(number).hashes, block)
            if position >= 0:
                return number, position
        return self._search_unfiled(bit, block, by_engine=False)

    def where_all(self, block: int) -> tuple[int, int] | None:
        """Look for a block in every span that is not filed; above a bound of these, not at all."""
        if not self.blocks_unfiled or self.blocks_unfiled > _SEARCHED_MAX:
            return None
        return self._search((number for number, span in self.numbered() if not span.filed), block, by_engine=False)

    def _search_unfiled(self, bit: int, value: int, *, by_engine: bool) -> tuple[int, int] | None:
        """Search what a worker holds that is not filed, and file some of it."""
        unfiled = self.unfiled.get(bit.bit_length() - 1)
        if not unfiled:
            return None
        found = self._search(unfiled, value, by_engine=by_engine)
        for oldest in list(islice(unfiled, _FILED_PER_SEARCH)):
            self._file(oldest)
        return found

    def _search(self, numbers: Iterable[int], value: int, *, by_engine: bool) -> tuple[int, int] | None:
        wanted = array("Q", [value]).tobytes()
        for number in numbers:
            span = self.span(number)
            column = span.engine if by_engine else span.hashes
            if column is None:
                continue
            raw = column.tobytes()
            at = raw.find(wanted)
            while at > 0 and at % 8:
                at = raw.find(wanted, at + 1)
            if at >= 0:
                return number, at // 8
        return None

    def where_engine(self, bit: int, engine_hash: int) -> tuple[int, int] | None:
        """Return (span number, position) of the block that a worker holds under its own hash, or None.

        Cost: as `where`.
        """
        aliases = self.aliases.get(bit)
        if aliases is not None and engine_hash in aliases:
            own = aliases[engine_hash]
            return None if own is None else self.where(own, bit)
        number = self.by_engine.get(engine_hash & KEY)
        if number is not None:
            span = self.span(number)
            position = -1 if span.engine is None else position_in(span.engine, engine_hash)
            if position >= 0 and span.mask & bit:
                return number, position
        return self._search_unfiled(bit, engine_hash, by_engine=True)

    def block_at(self, place: tuple[int, int]) -> int:
        """Return our hash of the block at (span number, position)."""
        return self.span(place[0]).hashes[place[1]]

    def numbered(self) -> Iterator[tuple[int, Span]]:
        """Yield every span with its number."""
        for number, span in enumerate(self.spans):
            if span is not None:
                yield number, span

    def spans_of(self, bit: int) -> list[Span]:
        """Return the spans of a worker. Cost: walks them and all that are filed."""
        numbers = [*self.unfiled.get(bit.bit_length() - 1, ()), *self.filed]
        return [span for span in map(self.spans.__getitem__, numbers) if span is not None and span.mask & bit]

    def span(self, number: int) -> Span:
        span = self.spans[number]
        assert span is not None
        return span

    def _clean(self, number: int) -> Span:
        """Return a span without the bits of workers that are gone."""
        span = self.span(number)
        span.mask &= self.alive
        return span

    def _file(self, number: int) -> None:
        """Let the map lead to every block of a span."""
        span = self.span(number)
        if span.filed:
            return
        span.filed = True
        self.filed[number] = None
        self.blocks_unfiled -= len(span.hashes)
        for slot in bits(span.mask):
            self.unfiled.get(slot, {}).pop(number, None)
        for key in keys_of(span.hashes):
            self.by_hash.setdefault(key, number)
        if span.engine is not None:
            for key in keys_of(span.engine):
                self._file_name(key, number)

    def _file_name(self, key: int, number: int) -> None:
        """Let a name lead to a span, unless it already leads to one that has a holder."""
        other = self.by_engine.setdefault(key, number)
        if other != number and not self.span(other).mask & self.alive:
            self.by_engine[key] = number

    def _note_unfiled(self, number: int, bit: int) -> None:
        self.unfiled.setdefault(bit.bit_length() - 1, {})[number] = None

    def _number(self) -> int:
        if self.free:
            return self.free.pop()
        self.spans.append(None)
        return len(self.spans) - 1

    def _ending_in(self, block: int | None) -> int | None:
        """Return the span whose last block is ``block``, or None."""
        number = None if block is None else self.by_hash.get(block & KEY)
        if number is None or self.span(number).hashes[-1] != block:
            return None
        return number if self._clean(number).mask else None

    def _joins(self, left: int, right: int, mask: int, length: int) -> bool:
        """Tell whether the first blocks of ``right``, once held by ``mask``, go on where ``left`` ends."""
        a, b = self.span(left), self.span(right)
        return (
            left != right
            and a.mask == mask
            and b.parent == a.hashes[-1]
            and (a.engine is None) == (b.engine is None)
            and len(a.hashes) + length <= SPAN_MAX
        )

    def _follows(self, right: int, left: int, mask: int, length: int) -> bool:
        """Tell whether ``right``, held by ``mask``, goes on where ``left`` ends."""
        b = self.spans[right] if 0 <= right < len(self.spans) else None
        a = self.span(left)
        return (
            b is not None
            and left != right
            and b.mask == mask
            and b.parent == a.hashes[-1]
            and (a.engine is None) == (b.engine is None)
            and len(b.hashes) + length <= SPAN_MAX
        )

    def _cut(self, number: int, position: int) -> tuple[int, int]:
        """Cut a span in two before ``position``; return (left, right). The shorter part gets the new number."""
        self._file(number)
        span = self.span(number)
        hashes, engine = span.hashes, span.engine
        right = Span(hashes[position:], None if engine is None else engine[position:], span.mask, hashes[position - 1])
        left = Span(hashes[:position], None if engine is None else engine[:position], span.mask, span.parent)
        left.odd = right.odd = span.odd
        other = self._number()
        if len(left.hashes) < len(right.hashes):
            self.spans[number], self.spans[other] = right, left
            self._point(left, number, other)
            numbers = other, number
        else:
            self.spans[number], self.spans[other] = left, right
            self._point(right, number, other)
            numbers = number, other
        self.filed[other] = None
        # The oldest go first, and the head of a chain must not go before its end.
        self.age[other] = None
        self.age.move_to_end(numbers[0])
        return numbers

    def _move_front(self, source: int, length: int, to: int) -> None:
        """Move the first ``length`` blocks of a span to the end of another."""
        self._file(source)
        self._file(to)
        a, b = self.span(to), self.span(source)
        part = Span(b.hashes[:length], None if b.engine is None else b.engine[:length], 0, None)
        self._point(part, source, to)
        a.hashes.extend(part.hashes)
        b.parent = part.hashes[-1]
        del b.hashes[:length]
        if part.engine is not None and a.engine is not None and b.engine is not None:
            a.engine.extend(part.engine)
            del b.engine[:length]
            a.odd |= b.odd

    def _move_back(self, source: int, position: int, to: int) -> None:
        """Move the blocks of a span from ``position`` on to the front of another."""
        self._file(source)
        self._file(to)
        a, b = self.span(source), self.span(to)
        part = Span(a.hashes[position:], None if a.engine is None else a.engine[position:], 0, None)
        self._point(part, source, to)
        b.hashes = part.hashes + b.hashes
        b.parent = a.hashes[position - 1]
        del a.hashes[position:]
        if part.engine is not None and a.engine is not None and b.engine is not None:
            b.engine = part.engine + b.engine
            del a.engine[position:]
            b.odd |= a.odd

    def _point(self, part: Span, old: int, new: int) -> None:
        """Let the maps say ``new`` for blocks that moved."""
        self.by_hash.update(zip(keys_of(part.hashes), repeat(new)))
        if part.engine is not None:
            by_engine = self.by_engine
            for key in keys_of(part.engine):
                if by_engine.get(key) == old:
                    by_engine[key] = new

    def _drop(self, number: int) -> None:
        """Forget a span and its blocks."""
        self._shorten(number, 0)

    def _shorten(self, number: int, keep: int) -> None:
        """Forget the blocks of a span from ``keep`` on, and the span where none is left."""
        span = self.span(number)
        by_hash, by_engine = self.by_hash, self.by_engine
        self.blocks -= len(span.hashes) - keep
        if span.filed:
            for key in keys_of(span.hashes[keep:]):
                del by_hash[key]
        else:
            self.blocks_unfiled -= len(span.hashes) - keep
            by_hash.pop(span.hashes[-1] & KEY, None)
            if keep:
                by_hash[span.hashes[keep - 1] & KEY] = number
            else:
                by_hash.pop(span.hashes[0] & KEY, None)
                for slot in bits(span.mask):
                    self.unfiled.get(slot, {}).pop(number, None)
        if span.engine is not None and not span.filed:
            for name in (span.engine[0], span.engine[-1]) if not keep else (span.engine[-1],):
                if by_engine.get(name & KEY) == number:
                    del by_engine[name & KEY]
            if keep:
                self._file_name(span.engine[keep - 1] & KEY, number)
        elif span.engine is not None:
            for key in keys_of(span.engine[keep:]):
                if by_engine.get(key) == number:
                    del by_engine[key]
        if keep:
            del span.hashes[keep:]
            if span.engine is not None:
                del span.engine[keep:]
            return
        self.spans[number] = None
        self.filed.pop(number, None)
        del self.age[number]
        self.free.append(number)
