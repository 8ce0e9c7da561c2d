"""Map from engines' own block hashes to ours: translates opaque KV events.

Our hash of a stored block comes from its tokens and extras, chained from the translated parent. What its first holder
calls a block is remembered beside the block (`Span.engine`); another worker that calls it differently has an *alias*
for it. A block that could not be placed has the alias None.

A lower tier announces names alone. One that means nothing yet, such as that of a block on a disk that outlived its
engine, is *awaited*: it is placed in that tier once an event with tokens tells which block it is.

Names of different workers are kept apart by a salt that is mixed into them, so that small numbers or chance never take
one worker's block for another's. Workers that are declared to hash alike share a salt; then a shared block costs no
alias.
"""

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from penstock.kernel.hashing import chain, local_hashes
from penstock.kernel.values import KvEvent, KvStored
from penstock.router.kv_index.indexer import IndexCounters
from penstock.router.kv_index.spans import Spans

_UNSIGNED = (1 << 64) - 1
ALIASES_MAX = 1 << 18
"""Aliases per worker and tier; the oldest go, and with each its block, whose removal could not be translated."""
AWAITED_MAX = 1 << 18
"""Awaited names per worker: 8 million tokens in blocks of 32, in some 30 MB; the oldest go."""


class EngineHashMap:
    """Stores events with opaque hashes into the tiers' spans."""

    def __init__(self, tiers: list[Spans], counters: IndexCounters) -> None:
        self._tiers = tiers
        self._counters = counters
        self.awaited: dict[int, dict[int, int]] = {}
        """Bit of a worker -> name -> the tiers that have it, a bit for each."""

    def store(self, bit: int, spans: Spans, event: KvStored, block_size: int, salt: int) -> None:
        """Store the blocks of an event under our hashes; count and leave out what can't be placed."""
        names = salted(event.hashes, salt)
        if event.blocks is not None:
            self._put(bit, spans, array("Q", event.blocks), event.parent, names)
            return
        if not event.tokens and event.local is None:
            self._store_copies(bit, spans, names)
            return
        if spans is not self._tiers[0]:
            # Its names say which blocks these are; its tokens may come without the salt and the media of their prompt.
            known = next((i for i, name in enumerate(names) if self._place_of(bit, name) is None), len(names))
            if known:
                self._store_copies(bit, spans, names[:known])
                if known == len(names):
                    return
                local = None if event.local is None else event.local[known:]
                extras = None if event.extras is None else event.extras[known:]
                tokens = event.tokens[known * block_size :]
                rest, before = event.hashes[known:], event.hashes[known - 1]
                event = msgspec.structs.replace(
                    event, hashes=rest, parent=before, tokens=tokens, extras=extras, local=local
                )
                names = names[known:]
        parent: int | None = None
        if event.parent is not None:
            place = self._place_of(bit, event.parent & _UNSIGNED ^ salt)
            if place is None:
                self._counters.parents_unknown += 1
                self.misplace(bit, names)
                return
            parent = place[0].block_at(place[1])
        local = _local(event, block_size) if event.local is None else event.local
        if local is None or len(local) != len(names):
            self._counters.malformed += 1
            self.misplace(bit, names)
            return
        self._put(bit, spans, array("Q", chain(local, parent)), parent, names)

    def misplace(self, bit: int, names: Sequence[int]) -> None:
        """Remember that a worker means by these names blocks that we could not place."""
        for spans in self._tiers:
            for name in names:
                place = spans.where_engine(bit, name)
                if place is None or not spans.span(place[0]).mask & bit:
                    self._alias(bit, spans, name, None)

    def _store_copies(self, bit: int, spans: Spans, names: "array[int]") -> None:
        """Store blocks that came without tokens (a copy into a lower tier) as those that the worker holds already."""
        i = 0
        while i < len(names):
            place = self._place_of(bit, names[i])
            if place is None:
                self._counters.unplaced += 1
                self._await(bit, spans, names[i])
                i += 1
                continue
            source, (number, first) = place
            j = i + 1
            while j < len(names) and self._place_of(bit, names[j]) == (source, (number, first + j - i)):
                j += 1
            span = source.span(number)
            parent = span.hashes[first - 1] if first else span.parent
            self._put(bit, spans, span.hashes[first : first + j - i], parent, names[i:j])
            i = j

    def _put(self, bit: int, spans: Spans, blocks: "array[int]", parent: int | None, names: "array[int]") -> None:
        """Store blocks, and make sure that this worker's names lead to them."""
        unhashed_blocks = [(0, len(names))] if spans.aliases.get(bit) else []
        found = spans.store(bit, blocks, parent, names)
        if unhashed_blocks or found:
            together = set(blocks)
            for low, high in unhashed_blocks or found:
                for name, block in zip(names[low:high], blocks[low:high], strict=True):
                    self._name(bit, spans, name, block, together)
        if bit in self.awaited:
            self._place_awaited(bit, blocks, parent, names)

    def _await(self, bit: int, spans: Spans, name: int) -> None:
        waiting = self.awaited.setdefault(bit, {})
        waiting[name] = waiting.get(name, 0) | 1 << self._tiers.index(spans)
        if len(waiting) > AWAITED_MAX:
            del waiting[next(iter(waiting))]

    def _place_awaited(self, bit: int, blocks: "array[int]", parent: int | None, names: "array[int]") -> None:
        """Store blocks whose names were awaited in the tiers that announced them."""
        waiting = self.awaited[bit]
        tiers = [waiting.pop(name, 0) for name in names]
        if not waiting:
            del self.awaited[bit]
        for number, spans in enumerate(self._tiers):
            start = 0
            while start < len(tiers):
                end = start
                while end < len(tiers) and tiers[end] >> number & 1:
                    end += 1
                if end > start:
                    self._put(bit, spans, blocks[start:end], blocks[start - 1] if start else parent, names[start:end])
                start = end + 1

    def removed(self, bit: int, spans: Spans, names: Sequence[int]) -> None:
        """A worker's tier has lost blocks: await them there no longer."""
        waiting = self.awaited.get(bit)
        if waiting is None:
            return
        keep = ~(1 << self._tiers.index(spans))
        for name in names:
            left = waiting.pop(name, 0) & keep
            if left:
                waiting[name] = left
        if not waiting:
            del self.awaited[bit]

    def _name(self, bit: int, spans: Spans, name: int, block: int, together: set[int]) -> None:
        """Let ``name`` mean ``block`` for one worker.

        ``together``: the blocks of the same event, which are held whatever their names meant before.
        """
        place = spans.where_engine(bit, name)
        before = None if place is None else spans.block_at(place)
        if before == block:
            return
        if before is not None and before not in together and spans.holds(bit, before):
            # An old name for a new block: the engine can't hold the old one any more.
            spans.remove(bit, [before])
        spans.aliases.get(bit, {}).pop(name, None)
        place = spans.where_engine(bit, name)
        if (place is None or spans.block_at(place) != block) and spans.holds(bit, block):
            self._counters.aliases += 1
            self._alias(bit, spans, name, block)

    def _alias(self, bit: int, spans: Spans, name: int, block: int | None) -> None:
        aliases = spans.aliases.setdefault(bit, {})
        aliases[name] = block
        if len(aliases) > ALIASES_MAX:
            given_up = aliases.pop(next(iter(aliases)))
            if given_up is not None:
                spans.remove(bit, [given_up])

    def _place_of(self, bit: int, name: int) -> tuple[Spans, tuple[int, int]] | None:
        """Return where the block stands that a worker holds under a name of its own, or None."""
        for spans in self._tiers:
            place = spans.where_engine(bit, name)
            if place is not None and spans.span(place[0]).mask & spans.alive & bit:
                return spans, place
        return None


def unsigned(hashes: Sequence[int]) -> "array[int]":
    """Return hashes as unsigned 64-bit numbers; engines announce them signed as well."""
    try:
        return array("Q", hashes)
    except OverflowError:
        return array("Q", [value & _UNSIGNED for value in hashes])


def salted(names: Sequence[int], salt: int) -> "array[int]":
    """Return names as unsigned 64-bit numbers with a salt mixed in."""
    out = unsigned(names)
    if salt:
        mixed = np.frombuffer(out, np.uint64)
        np.bitwise_xor(mixed, np.uint64(salt), out=mixed)
    return out


def salt_of(text: str) -> int:
    """Return the salt of a worker, or of a group of workers that hash alike."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=1)


def wordless(event: KvEvent, *, native: bool, block_size: int | None) -> KvEvent:
    """Return an event that means the same to an index, without the prompt's tokens.

    Args:
        native: its hashes are ours, and need no translation.
        block_size: tokens per block of the worker; None takes the event's own.
    """
    if not isinstance(event, KvStored) or not event.tokens:
        return event
    local = None
    if not native:
        size = block_size or event.block_size or len(event.tokens) // max(1, len(event.hashes))
        local = _local(event, size) or []  # what does not fit together is counted by the index
    return msgspec.structs.replace(event, tokens=[], extras=None, local=local)


def _local(event: KvStored, block_size: int) -> list[int] | None:
    """Hash an event's blocks each by itself, or return None where tokens, extras and hashes do not fit together."""
    count = len(event.hashes)
    if len(event.tokens) != count * block_size or (event.extras is not None and len(event.extras) != count):
        return None
    try:
        return local_hashes(event.tokens, block_size, event.extras)
    except OverflowError:  # a token id that is no u32
        return None
