"""Which workers hold which block of one tier? A flat map from chained hash to a worker bit mask.

The map is flat, and the mask is stored once per *span*: a stretch of one chain whose blocks the same workers hold.

    by_hash: block hash -> span number          spans[number]: hashes[], mask, parent

Blocks arrive, are shared and go in stretches, so one mask serves some hundred blocks, a look-up steps from span to
span instead of from block to block, and a worker that takes over a whole stretch costs one ``|=``. Where workers
come to differ, a span is cut. Nothing assumes that a worker holds a block's parents: a look-up meets every span on
its way, so a hole left by an out-of-order removal is a span without that worker's bit, and the answer stays exact.

The map's keys are the low 60 bits of a hash (Python stores those in 32 bytes, 64 bits in 48); the spans keep all 64,
and two hashes that agree in 60 bits but not in 64 are refused and counted, never mixed up.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from penstock.kernel.errors import InvariantError
from penstock.router.indexer import Counters
from penstock.router.slots import Ledger, bits

KEY = (1 << 60) - 1
SPAN_MAX = 2048
"""Blocks per span: bounds the search for a block inside its span (some 10 us) and the cost of dropping one."""
_ANCESTORS = 8
"""Spans towards the root that a new block keeps fresh, so that the oldest to go are not its own prefix."""


class Span:
    """A stretch of a chain. ``parent`` is the hash before ``hashes[0]``, None at the root or where it is unknown.

    ``engine``: the engine's own hashes of the same blocks, for workers whose events are translated. ``odd``: some of
    them belong to other blocks too, so each must be looked up by itself.
    """

    __slots__ = ("engine", "hashes", "mask", "odd", "parent")

    def __init__(self, hashes: "array[int]", engine: "array[int] | None", mask: int, parent: int | None) -> None:
        self.hashes = hashes
        self.engine = engine
        self.mask = mask
        self.parent = parent
        self.odd = False


class Spans:
    """The holders of one tier's blocks. Workers are bits; ``alive`` are the bits that count.

    ``ledger`` (shared by all tiers) counts the (worker, block) pairs of each bit and is kept up to date here.
    """

    def __init__(self, counters: Counters, ledger: Ledger) -> None:
        self.by_hash: dict[int, int] = {}
        self.by_engine: dict[int, int] = {}
        self.spans: list[Span | None] = []
        self.alive = 0
        self.counters = counters
        self.ledger = ledger
        self.aliases: dict[int, dict[int, int | None]] = {}
        """bit -> engine hash -> our hash, where that differs from ``by_engine``; None: a block we could not place."""
        self._free: list[int] = []
        self._age: OrderedDict[int, None] = OrderedDict()
        self._released = -1
        self._cursor = 0

    def __len__(self) -> int:
        return len(self.by_hash)

    # --- look-up ----------------------------------------------------------------------------------------------------

    def walk(self, blocks: Sequence[int], at: int, mask: int) -> list[tuple[int, int]]:
        """Follow a chain from block ``at`` and tell where each worker of ``mask`` stops holding it.

        Returns: (depth, workers) with depth > ``at`` rising; those who do not hold ``blocks[at]`` are absent.
        Cost: one look-up per span on the way, plus log2(span) where the chain leaves a span. Reads only.
        """
        ends: list[tuple[int, int]] = []
        find, spans, count, i = self.by_hash.get, self.spans, len(blocks), at
        while i < count:
            block = blocks[i]
            number = find(block & KEY)
            if number is None:
                break
            span = spans[number]
            assert span is not None
            hashes = span.hashes
            start = 0
            if hashes[0] != block:
                # Only a walk that starts below the root can begin inside a span.
                start = _position(hashes, block) if i == at else -1
                if start < 0:
                    break
            held = mask & span.mask
            if held != mask:
                if i > at:
                    ends.append((i, mask & ~held))
                mask = held
                if not mask:
                    return ends
            reach = min(len(hashes) - start, count - i)
            if hashes[start + reach - 1] != blocks[i + reach - 1]:
                # The chain leaves this span: equal hashes mean equal prefixes, so bisect for the last equal one.
                low, reach = 1, reach - 1
                while low < reach:
                    middle = (low + reach + 1) // 2
                    if hashes[start + middle - 1] == blocks[i + middle - 1]:
                        low = middle
                    else:
                        reach = middle - 1
            i += reach
        if i > at and mask:
            ends.append((i, mask))
        return ends

    def walk_linear(self, blocks: Sequence[int], at: int, mask: int) -> list[tuple[int, int]]:
        """Answer as `walk` does, block by block, without trusting the shape of any span."""
        ends: list[tuple[int, int]] = []
        for i in range(at, len(blocks)):
            held = mask & self.holders(blocks[i])
            if held != mask and i > at:
                ends.append((i, mask & ~held))
            mask = held
            if not mask:
                return ends
        if mask and len(blocks) > at:
            ends.append((len(blocks), mask))
        return ends

    def holders(self, block: int) -> int:
        """Return the bit mask of the workers that hold one block."""
        found = self.where(block)
        if found is None:
            return 0
        return self.span(found[0]).mask & self.alive

    def where(self, block: int) -> tuple[int, int] | None:
        """Return (span number, position) of a block, or None where nobody holds it."""
        number = self.by_hash.get(block & KEY)
        if number is None:
            return None
        position = _position(self.span(number).hashes, block)
        return None if position < 0 else (number, position)

    def where_engine(self, bit: int, engine_hash: int) -> tuple[int, int] | None:
        """Return (span number, position) of the block that a worker announced under its own hash, or None."""
        aliases = self.aliases.get(bit)
        if aliases is not None and engine_hash in aliases:
            own = aliases[engine_hash]
            return None if own is None else self.where(own)
        number = self.by_engine.get(engine_hash & KEY)
        if number is None:
            return None
        engine = self.span(number).engine
        position = -1 if engine is None else _position(engine, engine_hash)
        return None if position < 0 else (number, position)

    def block_at(self, place: tuple[int, int]) -> int:
        """Return our hash of the block at (span number, position)."""
        return self.span(place[0]).hashes[place[1]]

    def numbered(self) -> Iterator[tuple[int, Span]]:
        """Yield every span with its number."""
        for number, span in enumerate(self.spans):
            if span is not None:
                yield number, span

    # --- stored -----------------------------------------------------------------------------------------------------

    def store(
        self, bit: int, hashes: "array[int]", parent: int | None, engine: "array[int] | None" = None
    ) -> list[tuple[int, int]]:
        """Let the worker ``bit`` hold ``hashes``, consecutive blocks of one chain that follow ``parent``.

        Returns: the [low, high) ranges of the event whose ``engine`` hashes are not (only) known under the spans
            that now hold them, for the caller to sort out.
        """
        loose: list[tuple[int, int]] = []
        count, i = len(hashes), 0
        tail = self._ending_in(parent)
        touched: list[int] = []
        while i < count:
            number = self.by_hash.get(hashes[i] & KEY)
            if number is not None and not self._clean(number).mask:
                self._drop(number)  # left behind by workers that are gone
                number = None
            if number is None:
                number, taken, clean = self._add(bit, hashes, engine, i, parent, tail)
                tail = number
            else:
                span = self.span(number)
                position = _position(span.hashes, hashes[i])
                if position < 0:
                    self.counters.collisions += 1
                    break  # what follows can't be reached without this block
                taken = _agreement(span.hashes, position, hashes, i)
                if engine is None:
                    clean = True
                else:
                    known = span.engine
                    clean = (
                        not span.odd
                        and known is not None
                        and known[position : position + taken] == engine[i : i + taken]
                    )
                number = self._take(number, position, position + taken, bit, tail)
                tail = number
            if not clean:
                loose.append((i, i + taken))
            touched.append(number)
            i += taken
            parent = hashes[i - 1]
        self._touch(touched)
        return loose

    def _add(
        self,
        bit: int,
        hashes: "array[int]",
        engine: "array[int] | None",
        start: int,
        parent: int | None,
        tail: int | None,
    ) -> tuple[int, int, bool]:
        """Take in blocks that nobody held: extend the span before them, or begin one. Return (span, count, clean)."""
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
        keys = _keys(new)
        before = len(self.by_hash)
        # One pass in C: sets what is absent, and returns what was there.
        got = list(map(self.by_hash.setdefault, keys, repeat(number)))
        if len(self.by_hash) - before != len(new):
            new = new[: self._undo_foreign(got, keys, number, previous if grows else None, new)]
        names = None if engine is None else engine[start : start + len(new)]
        clean = True
        if names is not None:
            before = len(self.by_engine)
            for key in _keys(names):
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
            self._age[number] = None
        self._count(bit, len(new))
        self.counters.stored += len(new)
        return number, len(new), clean

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

    def _take(self, number: int, low: int, high: int, bit: int, tail: int | None) -> int:
        """Add a holder to blocks [low, high) of a span. Return the span that holds the last of them."""
        span = self._clean(number)
        if span.mask & bit:
            self.counters.duplicates += high - low
            return number
        self._count(bit, high - low)
        self.counters.stored += high - low
        if low == 0 and high == len(span.hashes):
            span.mask |= bit
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

    def remove(self, bit: int, hashes: Sequence[int], *, by_engine: bool = False) -> None:
        """Let the worker ``bit`` hold these blocks no longer; unknown ones are counted.

        Engines evict leaf first, so the hashes mostly are a stretch backwards; either direction goes at once.
        """
        wanted = array("Q", hashes)
        backwards = wanted[::-1]
        count, i = len(wanted), 0
        aliases = self.aliases.get(bit) if by_engine else None
        while i < count:
            place = self.where_engine(bit, wanted[i]) if by_engine else self.where(wanted[i])
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
                        high = position + _agreement(column, position, wanted, i)
            if high < len(span.hashes):
                self.counters.holes += 1
            self._release(number, low, high, bit)
            i += high - low

    def _release(self, number: int, low: int, high: int, bit: int) -> None:
        """Take a holder off blocks [low, high) of a span; the last holder takes the blocks with it."""
        span = self.span(number)
        length = len(span.hashes)
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
            self._released = number
            return
        after = self._released
        if high == length and self._follows(after, number, rest, length - low):
            self._move_back(number, low, after)
            return
        if high < length:
            number, _ = self._cut(number, high)
        if low:
            _, number = self._cut(number, low)
        self.span(number).mask = rest
        self._released = number

    # --- memory -----------------------------------------------------------------------------------------------------

    def evict_oldest(self) -> bool:
        """Drop the span that was stored to the longest ago; return False where none is left."""
        if not self._age:
            return False
        number = next(iter(self._age))
        span = self._clean(number)
        length = len(span.hashes)
        for slot in bits(span.mask):
            self.ledger.add(slot, -length)
        self.counters.evicted += span.mask.bit_count() * length
        self._drop(number)
        return True

    def sweep(self, budget: int) -> bool:
        """Take dead bits off the next spans, some ``budget`` spans and blocks of work; return True at the end.

        A span that nobody alive holds is dropped from its end, so that one step stays bounded.
        """
        while budget > 0:
            if self._cursor >= len(self.spans):
                self._cursor = 0
                return True
            span = self.spans[self._cursor]
            budget -= 1
            if span is None or self._clean(self._cursor).mask:
                self._cursor += 1
                continue
            keep = max(0, len(span.hashes) - budget - 1)
            budget -= len(span.hashes) - keep
            self._shorten(self._cursor, keep)
        return False

    def forget(self, bit: int) -> None:
        """Drop what is kept for one worker beside its bit."""
        self.aliases.pop(bit, None)

    # --- spans ------------------------------------------------------------------------------------------------------

    def span(self, number: int) -> Span:
        span = self.spans[number]
        assert span is not None
        return span

    def _clean(self, number: int) -> Span:
        """Return a span without the bits of workers that are gone."""
        span = self.span(number)
        span.mask &= self.alive
        return span

    def _number(self) -> int:
        if self._free:
            return self._free.pop()
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
        # The oldest go first, and the head of a chain must not go before its end.
        self._age[other] = None
        self._age.move_to_end(numbers[0])
        return numbers

    def _move_front(self, source: int, length: int, to: int) -> None:
        """Move the first ``length`` blocks of a span to the end of another."""
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
        self.by_hash.update(zip(_keys(part.hashes), repeat(new)))
        if part.engine is not None:
            by_engine = self.by_engine
            for key in _keys(part.engine):
                if by_engine.get(key) == old:
                    by_engine[key] = new

    def _drop(self, number: int) -> None:
        """Forget a span and its blocks."""
        self._shorten(number, 0)

    def _shorten(self, number: int, keep: int) -> None:
        """Forget the blocks of a span from ``keep`` on, and the span where none is left."""
        span = self.span(number)
        by_hash, by_engine = self.by_hash, self.by_engine
        for key in _keys(span.hashes[keep:]):
            del by_hash[key]
        if span.engine is not None:
            for key in _keys(span.engine[keep:]):
                if by_engine.get(key) == number:
                    del by_engine[key]
        if keep:
            del span.hashes[keep:]
            if span.engine is not None:
                del span.engine[keep:]
            return
        self.spans[number] = None
        del self._age[number]
        self._free.append(number)

    def _touch(self, numbers: list[int]) -> None:
        """Mark spans as fresh, the deepest first and some ancestors last, so that a chain ages from its end."""
        age = self._age
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
        self.ledger.add(bit.bit_length() - 1, blocks)

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "spans": [
                None
                if span is None
                else [
                    span.hashes.tobytes(),
                    None if span.engine is None else span.engine.tobytes(),
                    mask_bytes(span.mask),
                    span.parent,
                    span.odd,
                ]
                for span in self.spans
            ],
            "engine": [[key, number] for key, number in self.by_engine.items()],
            "aliases": [[bit.bit_length() - 1, list(map(list, names.items()))] for bit, names in self.aliases.items()],
            "alive": mask_bytes(self.alive),
            "free": list(self._free),
            "age": list(self._age),
            "released": self._released,
            "cursor": self._cursor,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the tier that wrote ``state``."""
        self.spans, self.by_hash = [], {}
        for number, saved in enumerate(state["spans"]):
            if saved is None:
                self.spans.append(None)
                continue
            hashes, engine, mask, parent, odd = saved
            span = Span(_loaded(hashes), None if engine is None else _loaded(engine), from_bytes(mask), parent)
            span.odd = odd
            self.spans.append(span)
            self.by_hash.update(zip(_keys(span.hashes), repeat(number)))
        self.by_engine = dict(state["engine"])
        self.aliases = {1 << slot: dict(names) for slot, names in state["aliases"]}
        self.alive = from_bytes(state["alive"])
        self._free = list(state["free"])
        self._age = OrderedDict.fromkeys(state["age"])
        self._released = state["released"]
        self._cursor = state["cursor"]

    def check(self, pairs: list[int]) -> None:
        """Add this tier's pairs per slot to ``pairs`` and raise where the maps and the spans disagree."""
        blocks = 0
        for number, span in self.numbered():
            blocks += len(span.hashes)
            if not span.hashes or (span.engine is not None and len(span.engine) != len(span.hashes)):
                raise InvariantError(f"span {number} is empty or its columns differ in length")
            if any(self.by_hash.get(block & KEY) != number for block in span.hashes):
                raise InvariantError(f"a block of span {number} is filed elsewhere")
            for slot in bits(span.mask & self.alive):
                pairs[slot] += len(span.hashes)
        if blocks != len(self.by_hash):
            raise InvariantError(f"{len(self.by_hash)} blocks are filed, {blocks} are held")
        for key, number in self.by_engine.items():
            engine = self.span(number).engine
            if engine is None or all(name & KEY != key for name in engine):
                raise InvariantError(f"an engine hash points to span {number}, which does not have it")
        if set(self._age) != {number for number, _ in self.numbered()}:
            raise InvariantError("the spans' ages and the spans differ")


def mask_bytes(mask: int) -> bytes:
    """Write a mask of any width as little-endian bytes."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def from_bytes(raw: bytes) -> int:
    """Read what `mask_bytes` wrote."""
    return int.from_bytes(raw, "little")


def _loaded(raw: bytes) -> "array[int]":
    out = array("Q")
    out.frombytes(raw)
    return out


def _position(hashes: "array[int]", block: int) -> int:
    """Return where a block stands in a span, or -1; the ends are looked at first."""
    if hashes[-1] == block:
        return len(hashes) - 1
    try:
        return hashes.index(block)
    except ValueError:
        return -1


def _agreement(span: "array[int]", position: int, event: "array[int]", start: int) -> int:
    """Count how many hashes two sequences share from these places on."""
    most = min(len(span) - position, len(event) - start)
    if span[position : position + most] == event[start : start + most]:
        return most
    same = 0
    while span[position + same] == event[start + same]:
        same += 1
    return same


def _keys(hashes: "array[int]") -> list[int]:
    """Return the map's keys of a run of hashes: below some 32 a loop is faster than numpy's fixed cost."""
    if len(hashes) < 32:
        return [value & KEY for value in hashes]
    out: list[int] = np.bitwise_and(np.frombuffer(hashes, np.uint64), np.uint64(KEY)).tolist()
    return out
