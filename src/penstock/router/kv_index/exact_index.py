"""Exact KV index: which target holds which leading blocks of a prompt, from the engines' KV events.

`penstock.router.kv_index.spans` keeps one tier; this puts three of them together, gives targets their bits,
translates engines' opaque hashes (`penstock.router.kv_index.engine_hash_map`), bounds memory and audits itself. Every
refusal is counted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import TIERS, KvCleared, KvEvent, KvRemoved, KvStored, Target, Tier
from penstock.router.kv_index import span_state
from penstock.router.kv_index.engine_hash_map import EngineHashMap, salt_of, salted, unsigned
from penstock.router.kv_index.index_states import ExactState, WindowState
from penstock.router.kv_index.indexer import Column, HeldBlocks, IndexCounters, Overlap, Stretch
from penstock.router.kv_index.span_table import Span
from penstock.router.kv_index.span_walk import AttentionWindow, usable, walk, walk_linear
from penstock.router.kv_index.spans import Spans
from penstock.router.kv_index.worker_bitmap import BitLedger, WorkerBits, mask_bytes, mask_of

BLOCKS_MAX = 1 << 24
"""Most (target, block) pairs of one model: 1,024 engines of 16,384 blocks, in some 170 MB."""
AUDIT_EVERY = 256
"""One look-up of so many is repeated block by block: a fault shows within seconds of load, and the cost is not felt."""
WINDOWS_MAX = 16
"""Kinds of windows of one model; releases of it may differ in them."""
_SWEEP_STEP = 64
"""Spans and blocks that one event sweeps after targets that are gone."""


class ExactIndex:
    """An index fed by KV events.

    Args:
        block_size: tokens per block of the pool; events of another size are refused and counted.
        blocks_max: most (target, block) pairs, all tiers together; what was stored the longest ago goes.
        audit_every: one look-up of so many is repeated block by block and compared; 0 never.
    Budget: a look-up 8 us at any depth, an event of 256 blocks 50 us, 10 bytes a pair (docs/bench/kv-index.md).
    """

    def __init__(self, block_size: int, *, blocks_max: int = BLOCKS_MAX, audit_every: int = AUDIT_EVERY) -> None:
        self.block_size = block_size
        self.blocks_max = blocks_max
        self.audit_every = audit_every
        self.counters = IndexCounters()
        self._ledger = BitLedger()
        self._slots = WorkerBits(self._ledger)
        # Only device events name the place of their blocks in a chain, which spans that are not filed rely on.
        self._tiers: dict[Tier, Spans] = {
            tier: Spans(self.counters, self._ledger, lazy=tier == "device") for tier in TIERS
        }
        self._device, self._host, self._disk = self._tiers.values()
        self._windows: list[AttentionWindow] = []
        self._all = list(self._tiers.values())
        """The tiers' spans, then the windows'."""
        self._translation = EngineHashMap(self._all, self.counters)
        self._native: dict[Target, bool] = {}
        """Whether a target's event hashes are ours; one that is not listed is judged by its events."""
        self._salts: dict[Target, int] = {}
        """Mixed into targets' engine hashes."""
        self._copying: set[Target] = set()
        """Targets that announce each copy of a block."""
        self._windows_read: dict[Target, list[int]] = {}
        """Windows of targets that cleared their caches: their layers are as they were."""
        self._sweeping = 0

    def __len__(self) -> int:
        return self._ledger.total

    @property
    def blocks(self) -> int:
        """Different blocks held, summed over tiers; a block on two workers counts once."""
        return sum(map(len, self._all))

    # --- look-up ----------------------------------------------------------------------------------------------------

    def overlap(self, blocks: Sequence[int], now: Nanos = 0, targets: Iterable[Target] | None = None) -> Overlap:
        """Count, per target, how many leading blocks of a prompt it holds, and what follows in its lower tiers.

        Args:
            blocks: chained hashes, shape (n,); block i stands for tokens [0, (i + 1) * block_size).
            now: is of no account here; an index that forgets with time needs it.
            targets: look at these alone; None for all.
        Returns:
            target -> `HeldBlocks`; targets that hold nothing are absent.
        Cost: one look-up per span on the way and distinct depth, not per block. Reads only, but for counters.
        """
        counters = self.counters
        counters.finds += 1
        mask = self._slots.alive
        if targets is not None:
            mask = 0
            for target in targets:
                mask |= self._slots.bit(target)
        ends = walk(self._device, blocks, 0, mask)
        if self.audit_every and not counters.finds % self.audit_every:
            ends = self._audited(blocks, mask, ends)
        if self._windows:
            ends = self._usable("device", blocks, ends, 0)
        lower = self._lower(blocks, ends, mask) if self._host.spans or self._disk.spans else None
        return Overlap(ends, self._slots.names, lower)

    def columns(self, blocks: Sequence[int], place: Mapping[Target, int]) -> tuple[Column, Sequence[Column]]:
        """Return the same for many targets; see `penstock.router.kv_index.indexer.EventIndexer.columns`."""
        found, column = self.overlap(blocks), self._slots.column
        if found.lower is None:
            return column(found.ends, place), ()
        tiers = zip(
            *[((held.device, mask), (held.host, mask), (held.disk, mask)) for held, mask in found.lower], strict=True
        )
        device, *lower = [column(each, place) for each in tiers] or [column((), place)]
        return device, lower if any(map(np.count_nonzero, lower)) else ()

    def audit(self, blocks: Sequence[int]) -> bool:
        """Compare the quick answer for a prompt with the one found block by block; count and return if they agree."""
        mask = self._slots.alive
        quick = walk(self._device, blocks, 0, mask)
        return self._audited(blocks, mask, quick) == quick

    def _audited(self, blocks: Sequence[int], mask: int, quick: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the answer found block by block, and count where ``quick`` differs from it."""
        self.counters.audits += 1
        exact = walk_linear(self._device, blocks, 0, mask)
        if exact != quick:
            self.counters.audit_disagreements += 1
        return exact

    def _lower(self, blocks: Sequence[int], ends: list[tuple[int, int]], mask: int) -> list[Stretch]:
        """Go on from where each target's device blocks end, through host and then disk."""
        rest = mask
        for _, holders in ends:
            rest &= ~holders
        found: list[Stretch] = []
        for device, holders in [(0, rest), *ends]:
            for host, in_host in self._onwards("host", blocks, device, holders):
                for disk, in_disk in self._onwards("disk", blocks, device + host, in_host):
                    if device or host or disk:
                        found.append(Stretch(HeldBlocks(device, host, disk), in_disk))
        return found

    def _onwards(self, tier: Tier, blocks: Sequence[int], at: int, mask: int) -> list[tuple[int, int]]:
        """Return (how many blocks from ``at`` on, workers that can use just those) in a tier; those with none first."""
        spans = self._tiers[tier]
        ends = self._usable(tier, blocks, walk(spans, blocks, at, mask), at) if mask and len(spans) else []
        rest = mask
        for _, holders in ends:
            rest &= ~holders
        return [*([(0, rest)] if rest else []), *((end - at, holders) for end, holders in ends)]

    def _usable(self, tier: Tier, blocks: Sequence[int], ends: list[tuple[int, int]], at: int) -> list[tuple[int, int]]:
        windows = [window for window in self._windows if window.tier == tier and window.workers]
        return usable(windows, blocks, ends, at) if windows else ends

    # --- events -----------------------------------------------------------------------------------------------------

    def join(self, target: Target, *, native: bool, alike: str | None = None, copies: bool = False) -> None:
        """Declare how a target hashes, before its events come.

        Args:
            native: its event hashes are `BlockHash`es and need no translation.
            alike: name of a way of hashing; equal blocks have equal engine hashes on all targets that declare it,
                which saves memory.
            copies: it may hold several copies of a device block, and announces the beginning and the end of each. The
                others' repeated announcements mean nothing.
        """
        self._native[target] = native
        if copies:
            self._copying.add(target)
        else:
            self._copying.discard(target)
        if alike is None:
            self._salts.pop(target, None)
        else:
            self._salts[target] = salt_of(f"alike {alike}")

    def apply(self, target: Target, event: KvEvent, *, own: bool | None = None) -> None:
        """Take in one KV event of a target, in the order in which the engine sent them.

        Args:
            own: True where the event's hashes are `BlockHash`es; False where they are the engine's and are
                translated by hashing the tokens. None: as `join` declared, else translated once the target sent tokens.
        Cost: some 0.2 us per block; translated, 0.8 us. Then a bounded step of sweeping.
        """
        if isinstance(event, KvStored):
            self.counters.events_stored += 1
            if event.hashes or event.window:
                self._stored(target, event, own)
        elif isinstance(event, KvRemoved):
            self.counters.events_removed += 1
            self._removed(target, event, own)
        else:
            assert isinstance(event, KvCleared)
            self.counters.events_cleared += 1
            read = self._read_by(target)
            self.clear(target, event.tier)
            if read and target not in self._slots:
                self._windows_read[target] = read
        self.sweep()

    def clear(self, target: Target, tier: Tier | None = None) -> None:
        """Forget all that a target holds, in constant time, or what it holds in one tier; it may store again at once.

        Cost: the latter walks all spans where it holds something in another tier.
        """
        bit = self._slots.bit(target)
        awaited = self._translation.awaited.get(bit, {})
        here = [] if tier is None else [self._tiers[tier], *(each.spans for each in self._windows if each.tier == tier)]
        if here and (awaited or any(_blocks_in(spans, bit) for spans in self._all if spans not in here)):
            for spans in here:
                blocks = list(_blocks_in(spans, bit))
                self._translation.removed(bit, spans, list(awaited))
                spans.copies.drop(bit, blocks)
                spans.remove(bit, blocks)
            return
        self._windows_read.pop(target, None)
        bit, _ = self._slots.leave(target)
        for spans in self._all:
            spans.alive = self._slots.alive
            spans.forget(bit)
        for window in self._windows:
            window.workers &= ~bit
        self._translation.awaited.pop(bit, None)

    def remove(self, target: Target) -> None:
        """A target is gone: forget what it holds and how it hashes. Constant time."""
        self.clear(target)
        self._native.pop(target, None)
        self._salts.pop(target, None)
        self._copying.discard(target)

    def sweep(self, step: int = _SWEEP_STEP) -> bool:
        """Clear a bounded part of what targets that are gone left behind; return True where nothing is left to do.

        Every `apply` takes one step; call it from an idle moment where events are rare.
        """
        if not self._slots.sweep_due:
            return True
        if self._all[self._sweeping].sweep(step):
            self._sweeping += 1
            if self._sweeping == len(self._all):
                self._sweeping = 0
                self._slots.sweep_done()
        return False

    def _stored(self, target: Target, event: KvStored, own: bool | None) -> None:
        known = target in self._slots
        bit = self._slots.join(target)
        if not known:
            for spans in self._all:
                spans.alive = self._slots.alive
            for blocks in self._windows_read.pop(target, ()):
                self._window_of(event.tier, blocks, bit)
        translatable = bool(event.tokens or event.window or event.blocks) or event.local is not None
        native = self._is_native(target, own, translatable)
        fits = event.block_size in (0, self.block_size)
        spans = self._tiers[event.tier]
        if event.window:
            window = self._window_of(event.tier, event.window, bit) if fits else None
            if window is None:
                self.counters.unplaced += len(event.hashes)
                return
            spans = window.spans
        if target in self._copying and event.tier == "device":
            spans.copies.bits |= bit
        if event.block_size not in (0, self.block_size):
            self.counters.refused_block_size += 1
            if not native:
                self._translation.misplace(bit, salted(event.hashes, self._salt(target)))
        elif native:
            spans.store(bit, unsigned(event.hashes), event.parent)
        else:
            self._translation.store(bit, spans, event, self.block_size, self._salt(target))
        while self._ledger.total > self.blocks_max and max(self._all, key=len).evict_oldest():
            pass

    def _removed(self, target: Target, event: KvRemoved, own: bool | None) -> None:
        bit = self._slots.bit(target)
        if not bit:
            self.counters.removed_unknown += len(event.hashes)
            return
        spans = self._tiers[event.tier]
        if event.window:
            window = self._window_of(event.tier, event.window, 0)
            if window is None:
                self.counters.removed_unknown += len(event.hashes)
                return
            spans = window.spans
        by_engine = not self._is_native(target, own, False)
        names = salted(event.hashes, self._salt(target)) if by_engine else unsigned(event.hashes)
        if by_engine:
            self._translation.removed(bit, spans, names)
        spans.remove(bit, spans.take_copies(bit, names, by_engine=by_engine), by_engine=by_engine)

    def _window_of(self, tier: Tier, blocks: int, bit: int) -> AttentionWindow | None:
        """Return what a tier has for layers that read so many blocks, and note who has such ones (``bit``).

        None: nobody had, and there are too many kinds of them.
        """
        of_kind = [window for window in self._windows if window.blocks == blocks]
        if not of_kind and bit and len(self._windows) < WINDOWS_MAX * len(TIERS):
            of_kind = [AttentionWindow(each, blocks, Spans(self.counters, self._ledger, lazy=False)) for each in TIERS]
            for window in of_kind:
                window.spans.alive = self._slots.alive
                self._windows.append(window)
                self._all.append(window.spans)
        for window in of_kind:
            window.workers |= bit
        return next((window for window in of_kind if window.tier == tier), None)

    def _read_by(self, target: Target) -> list[int]:
        """Return what windows the layers of a target read."""
        bit = self._slots.bit(target)
        return [each.blocks for each in self._windows if each.tier == "device" and each.workers & bit]

    def _salt(self, target: Target) -> int:
        salt = self._salts.get(target)
        if salt is None:
            salt = self._salts[target] = salt_of(f"target {target.worker} {target.rank}")
        return salt

    def _is_native(self, target: Target, own: bool | None, tokens: bool) -> bool:
        if own is not None:
            return own
        if tokens:
            return self._native.setdefault(target, False)
        return self._native.get(target, True)

    # --- other queries ----------------------------------------------------------------------------------------------

    def targets(self) -> list[Target]:
        """Return the targets that stored something since they last were cleared."""
        return list(self._slots)

    def resident(self, target: Target) -> int:
        """Return how many blocks a target holds in its engine's own memory."""
        return self._device.counts[self._slots.bit(target)]

    def windowed(self, target: Target | None = None) -> bool:
        """Tell whether some layers of a target, or of any, read a window of a prompt or one state."""
        if target is None:
            return any(window.workers for window in self._windows)
        return bool(self._read_by(target))

    def blocks_of(self, target: Target, tier: Tier = "device") -> set[int]:
        """Return every block that a target holds in a tier. Cost: walks its spans, and all that are filed."""
        return _blocks_in(self._tiers[tier], self._slots.bit(target))

    def engine_hashes(self, target: Target, tier: Tier) -> list[int]:
        """Return what a target calls the blocks that it holds in a tier: 64 bits as its events have them, of each one.

        Cost: walks its spans, and all that are filed.
        """
        return [name for _, names, _ in self._named(target, self._tiers[tier]) for name in names]

    def dump(self, target: Target) -> Iterator[KvStored]:
        """Yield events from which a fresh index, where the target joined likewise, has all that this one has of it.

        Cost: walks its spans, and all that are filed.
        """
        bit, size, salt = self._slots.bit(target), self.block_size, self._salt(target)
        native = self._is_native(target, None, False)
        places = [(spans, tier, 0) for tier, spans in self._tiers.items()]
        for window in self._windows:
            if window.workers & bit:
                yield KvStored(hashes=[], block_size=size, tier=window.tier, window=window.blocks)
            places.append((window.spans, window.tier, window.blocks))
        for spans, tier, width in places:
            more = spans.copies.of(bit)
            for span, names, others in self._named(target, spans):
                hashes = span.hashes.tolist()
                blocks = None if native else hashes
                yield KvStored(
                    hashes=names, parent=span.parent, block_size=size, tier=tier, window=width, blocks=blocks
                )
                for at, block in enumerate(hashes) if others or more else ():
                    again = others.get(block, [])
                    if spans.copies.bits & bit:  # each of its announcements is a copy
                        count = more.get(block, 0)
                        again = [*again[:count], *[names[at]] * (count - len(again))]
                    parent = hashes[at - 1] if at else span.parent
                    for name in again:
                        blocks = None if native else [block]
                        yield KvStored(
                            hashes=[name], parent=parent, block_size=size, tier=tier, window=width, blocks=blocks
                        )
        for name, waits in self._translation.awaited.get(bit, {}).items():
            for number, (_, tier, width) in enumerate(places):
                if waits >> number & 1:
                    yield KvStored(hashes=[name ^ salt], block_size=size, tier=tier, window=width)

    def _named(self, target: Target, spans: Spans) -> Iterator[tuple[Span, list[int], dict[int, list[int]]]]:
        """Yield each span of which a target holds the blocks, what it calls them, and block -> its further names.

        Where it has no names they are ours.
        """
        bit, salt, native = self._slots.bit(target), self._salt(target), self._is_native(target, None, False)
        aliases: dict[int, list[int]] = {}
        for name, block in spans.aliases.get(bit, {}).items():
            if block is not None:
                aliases.setdefault(block, []).append(name ^ salt)
        for span in spans.spans_of(bit):
            ours = native or span.engine is None
            names = span.hashes.tolist() if ours else salted(span.engine or (), salt).tolist()
            others: dict[int, list[int]] = {}
            for at, block in enumerate(span.hashes) if aliases else ():
                if block in aliases:
                    # The first holder's name may be this target's, too.
                    first, *rest = aliases[block]
                    others[block] = rest if ours else [*rest, names[at]]
                    names[at] = first
            yield span, names, others

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> ExactState:
        """Return the state."""
        return ExactState(
            block_size=self.block_size,
            slots=self._slots.snapshot(),
            tiers={tier: span_state.snapshot(spans) for tier, spans in self._tiers.items()},
            windows=[
                WindowState(each.tier, each.blocks, mask_bytes(each.workers), span_state.snapshot(each.spans))
                for each in self._windows
            ],
            windows_read=self._windows_read,
            native=self._native,
            salts=self._salts,
            copying=sorted(self._copying),
            awaited={bit.bit_length() - 1: names for bit, names in self._translation.awaited.items()},
            sweeping=self._sweeping,
            counters=self.counters.as_dict(),
        )

    def restore(self, plain: Any) -> None:
        """Become the index of a state, or of one as plain data."""
        state = msgspec.convert(plain, ExactState)
        self.block_size = state.block_size
        self._slots.restore(state.slots)
        for tier, spans in self._tiers.items():
            span_state.restore(spans, state.tiers[tier])
        self._windows.clear()
        del self._all[len(self._tiers) :]
        for saved in state.windows:
            window = AttentionWindow(saved.tier, saved.blocks, Spans(self.counters, self._ledger, lazy=False))
            window.workers = mask_of(saved.workers)
            span_state.restore(window.spans, saved.spans)
            self._windows.append(window)
            self._all.append(window.spans)
        self._windows_read, self._native, self._salts = state.windows_read, state.native, state.salts
        self._copying = set(state.copying)
        self._translation.awaited = {1 << slot: names for slot, names in state.awaited.items()}
        self._sweeping = state.sweeping
        for name, count in state.counters.items():
            setattr(self.counters, name, count)

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: walks everything."""
        self._slots.check()
        pairs = [0] * len(self._ledger.pairs)
        for spans in self._all:
            if spans.alive != self._slots.alive:
                raise InvariantError("a tier counts other targets than the index")
            span_state.check(spans, pairs)
        if pairs != self._ledger.pairs:
            raise InvariantError(f"the ledger says {self._ledger.pairs}, the spans hold {pairs}")


def _blocks_in(spans: Spans, bit: int) -> set[int]:
    return {block for span in spans.spans_of(bit) for block in span.hashes}
