"""How are the blocks of one tier filed? Spans in a flat map, cut and joined where their holders differ.

The part of `penstock.router.spans` that moves blocks between spans without changing who holds them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np

from penstock.kernel.errors import InvariantError
from penstock.router.slots import bits

KEY = (1 << 60) - 1
"""The map's keys are the low 60 bits of a hash: Python keeps those in 32 bytes, 64 bits in 48."""
SPAN_MAX = 2048
"""Blocks per span: bounds the search for a block inside its span (some 10 us) and the cost of dropping one."""


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


class SpanTable:
    """Spans and the maps that lead to them."""

    def __init__(self) -> None:
        self.by_hash: dict[int, int] = {}
        self.by_engine: dict[int, int] = {}
        self.spans: list[Span | None] = []
        self.alive = 0
        """Bits of the workers that count; others are left over from workers that are gone."""
        self.aliases: dict[int, dict[int, int | None]] = {}
        """bit -> engine hash -> our hash, where that differs from ``by_engine``; None: a block we could not place."""
        self._free: list[int] = []
        self._age: OrderedDict[int, None] = OrderedDict()
        """Span numbers, the one stored to the longest ago first."""
        self._released = -1
        self._cursor = 0

    def __len__(self) -> int:
        return len(self.by_hash)

    def where(self, block: int) -> tuple[int, int] | None:
        """Return (span number, position) of a block, or None where nobody holds it."""
        number = self.by_hash.get(block & KEY)
        if number is None:
            return None
        position = position_in(self.span(number).hashes, block)
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
        position = -1 if engine is None else position_in(engine, engine_hash)
        return None if position < 0 else (number, position)

    def block_at(self, place: tuple[int, int]) -> int:
        """Return our hash of the block at (span number, position)."""
        return self.span(place[0]).hashes[place[1]]

    def numbered(self) -> Iterator[tuple[int, Span]]:
        """Yield every span with its number."""
        for number, span in enumerate(self.spans):
            if span is not None:
                yield number, span

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
        for key in keys_of(span.hashes[keep:]):
            del by_hash[key]
        if span.engine is not None:
            for key in keys_of(span.engine[keep:]):
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
            self.by_hash.update(zip(keys_of(span.hashes), repeat(number)))
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
