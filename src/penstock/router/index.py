"""Who holds which block, exactly? A flat map from chained hash to a bit mask of targets, fed from KV events.

A target's bit is its *slot*. What a target holds is closed under prefixes (engines evict leaves first), so the masks
along a prompt only ever lose bits, and the depth of every target is found by galloping: O(log depth) look-ups per
distinct depth. Where an engine removes a block below ones that stay, that target has a *hole*; its removed blocks are
remembered until the ones above them went too, and until then it is looked up block by block.

Beside the masks each target keeps its blocks as *runs*: arrays of hashes, each hanging below a parent block. They cost
8 bytes a block and give what a mask can't: whether a removed block is a leaf, what to sweep when the target leaves (its
slot is dead at once, the masks are cleaned in bounded steps, and only then is the bit used again), and a dump.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.hashing import chain, local_hashes
from penstock.kernel.machine import Nanos
from penstock.kernel.values import TIERS, KvCleared, KvEvent, KvRemoved, KvStored, Target, Tier

U64 = (1 << 64) - 1
SWEEP_STEP = 512
"""Blocks of departed targets cleaned per applied event: a bound on the pause, not on the work."""


class Depth(msgspec.Struct, frozen=True):
    """Leading blocks that a target holds on its device, and beyond those in lower tiers."""

    device: int = 0
    host: int = 0
    disk: int = 0


class IndexCounters(msgspec.Struct):
    """What happened to the index since its start."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    duplicate_blocks: int = 0
    """Stored again while held."""
    unknown_removals: int = 0
    """Removed while not held."""
    orphans: int = 0
    """Opaque stored events whose parent we never translated: left out, so the target is claimed to hold less."""
    refused: int = 0
    """Stored events whose block size is not the pool's, or whose tokens do not match their hashes."""
    holes: int = 0
    """Blocks removed below ones that stayed."""
    evicted: int = 0
    """Pairs dropped to stay within ``blocks_max``."""
    audits: int = 0
    audit_disagreements: int = 0


class _Held:
    """What one target holds in one tier: its runs, and the holes in them."""

    __slots__ = ("children", "count", "gone", "runs", "tails")

    def __init__(self) -> None:
        self.runs: dict[int, tuple[int | None, array[int]]] = {}
        """Run number -> (parent hash, hashes). Numbers are never used twice."""
        self.tails: dict[int, int] = {}
        """Last hash of a run -> its number."""
        self.children: dict[int, int] = {}
        """Hash -> runs that hang below it."""
        self.gone: set[int] = set()
        """Removed hashes that still stand inside a run: the holes."""
        self.count = 0

    def hashes(self) -> Iterator[int]:
        gone = self.gone
        for _, run in self.runs.values():
            for value in run:
                if value not in gone:
                    yield value


class ExactIndex:
    """Overlap per target from stored, removed and cleared events.

    Args:
        block_size: tokens per block of this pool.
        blocks_max: most (target, block) pairs; beyond it the oldest runs go, tail first.
        audit_every: one look-up in so many is repeated block by block and compared; 0 never.
        hits_half_life: of the decayed hit count per prefix, nanoseconds; 0 keeps none.
    """

    def __init__(
        self, block_size: int, *, blocks_max: int = 1 << 24, audit_every: int = 0, hits_half_life: Nanos = 0
    ) -> None:
        self.block_size = block_size
        self.counters = IndexCounters()
        self._most = blocks_max
        self._audit_every = audit_every
        self._half_life = hits_half_life
        self._masks: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        self._slots: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}
        self._native: dict[Target, bool] = {}
        self._held: dict[int, dict[Tier, _Held]] = {}
        self._live = 0
        """Mask of the slots that are in use."""
        self._free: list[int] = []
        self._sweeping: list[tuple[int, Tier, Iterator[int]]] = []
        self._dirty: dict[int, int] = {}
        """Dead slot -> sweeps that are still to end before its bit is free."""
        self._own: dict[int, int] = {}
        """Opaque engine hash -> our chained hash; engines that hash alike share entries."""
        self._runs = 0
        self._pairs = 0
        self._lookups = 0
        self._hits: dict[int, tuple[float, Nanos]] = {}
        self._holed = 0
        """Mask of the slots with holes on the device tier."""

    def __len__(self) -> int:
        """Count (target, block) pairs, all tiers."""
        return self._pairs

    # --- events -----------------------------------------------------------------------------------------------------

    def join(self, target: Target, *, native: bool) -> None:
        """Take a target in; ``native`` says that its event hashes are our chained hashes."""
        if target not in self._slots:
            self._open_slot(target)
        self._native[target] = native

    def apply(self, target: Target, event: KvEvent) -> None:
        """Carry one event in; repeated ones change nothing.

        Cost: about 0.1 us per block where hashes are ours; opaque ones are hashed first.
        """
        if self._sweeping:
            self._sweep(SWEEP_STEP)
        slot = self._slots.get(target)
        if slot is None:
            slot = self._open_slot(target)
        if isinstance(event, KvStored):
            self._stored(target, slot, event)
        elif isinstance(event, KvRemoved):
            self._removed(target, slot, event)
        else:
            self.clear(target)

    def clear(self, target: Target) -> None:
        """Forget all that a target holds; constant time, like leaving."""
        if target in self._slots:
            native = self._native.get(target, False)
            self.remove(target)
            self.join(target, native=native)
            self.counters.cleared += 1

    def remove(self, target: Target) -> None:
        """A target is gone. Constant time: its bit is dead at once and the masks are cleaned in later steps."""
        slot = self._slots.pop(target, None)
        self._native.pop(target, None)
        if slot is None:
            return
        del self._targets[slot]
        self._live &= ~(1 << slot)
        self._holed &= ~(1 << slot)
        held = self._held.pop(slot)
        sweeps = [(slot, tier, cell.hashes()) for tier, cell in held.items() if cell.count]
        self._pairs -= sum(cell.count for cell in held.values())
        if sweeps:
            self._dirty[slot] = len(sweeps)
            self._sweeping.extend(sweeps)
        else:
            self._free.append(slot)

    def _stored(self, target: Target, slot: int, event: KvStored) -> None:
        hashes: Sequence[int] = event.hashes
        parent = event.parent
        if event.block_size and event.block_size != self.block_size:
            self.counters.refused += 1
            return
        if not self._native.get(target, False):
            translated = self._translate(event)
            if translated is None:
                return
            hashes, parent = translated
        if not hashes:
            return
        self.counters.stored += 1
        bit = 1 << slot
        masks = self._masks[event.tier]
        held = self._held[slot].setdefault(event.tier, _Held())
        if held.gone:
            self._heal(slot, held, hashes, masks, bit)
        # Known blocks come first (a shared prefix is announced again), new ones follow: find the seam.
        count = len(hashes)
        seam = 0
        while seam < count and masks.get(hashes[seam], 0) & bit:
            seam += 1
        if seam:
            self.counters.duplicate_blocks += seam
            parent = hashes[seam - 1]
            hashes = hashes[seam:]
            if not hashes:
                return
        self._set(masks, hashes, bit)
        self._hang(held, parent, hashes)
        held.count += len(hashes)
        self._pairs += len(hashes)
        if self._pairs > self._most:
            self._evict()

    def _set(self, masks: dict[int, int], hashes: Sequence[int], bit: int) -> None:
        """Set a target's bit on blocks that it does not hold."""
        count = len(hashes)
        seam = 0
        for value in hashes:  # blocks that others hold: a shared prefix
            mask = masks.get(value)
            if mask is None:
                break
            masks[value] = mask | bit
            seam += 1
        if seam == count:
            return
        rest = hashes[seam:] if seam else hashes
        if masks.keys().isdisjoint(rest):
            masks.update(zip(rest, repeat(bit)))  # one shared int object for the whole run
        else:
            for value in rest:
                masks[value] = masks.get(value, 0) | bit

    def _hang(self, held: _Held, parent: int | None, hashes: Sequence[int]) -> None:
        """Write new blocks down below their parent: at the end of its run where that is free, else as a run."""
        tails = held.tails
        if parent is not None:
            number = tails.get(parent)
            if number is not None and parent not in held.children:
                held.runs[number][1].extend(hashes)
                del tails[parent]
                tails[hashes[-1]] = number
                return
            held.children[parent] = held.children.get(parent, 0) + 1
        self._runs += 1
        held.runs[self._runs] = (parent, array("Q", hashes))
        tails[hashes[-1]] = self._runs

    def _heal(self, slot: int, held: _Held, hashes: Sequence[int], masks: dict[int, int], bit: int) -> None:
        """Blocks that were holes are announced again: they stand in their runs already."""
        for value in held.gone.intersection(hashes):
            held.gone.discard(value)
            masks[value] = masks.get(value, 0) | bit
            held.count += 1
            self._pairs += 1
        if not held.gone:
            self._holed &= ~bit

    def _removed(self, target: Target, slot: int, event: KvRemoved) -> None:
        bit = 1 << slot
        masks = self._masks[event.tier]
        held = self._held[slot].get(event.tier)
        native = self._native.get(target, False)
        self.counters.removed += 1
        for value in event.hashes:
            own = value if native else self._own.get(value & U64)
            mask = 0 if own is None else masks.get(own, 0)
            if own is None or held is None or not mask & bit:
                self.counters.unknown_removals += 1
                continue
            self._unset(masks, own, mask, bit)
            held.count -= 1
            self._pairs -= 1
            if own in held.tails and own not in held.children:
                self._cut(held, own)
            else:
                held.gone.add(own)
                self.counters.holes += 1
            if event.tier == "device":
                self._holed = self._holed | bit if held.gone else self._holed & ~bit

    def _cut(self, held: _Held, tail: int) -> None:
        """Take a leaf off its run, and with it the holes that it leaves at the end."""
        number = held.tails.pop(tail)
        parent, run = held.runs[number]
        run.pop()
        while run and run[-1] in held.gone and run[-1] not in held.children:
            held.gone.discard(run.pop())
        if run:
            held.tails[run[-1]] = number
            return
        del held.runs[number]
        if parent is None:
            return
        left = held.children[parent] - 1
        if left:
            held.children[parent] = left
            return
        del held.children[parent]
        if parent in held.gone and parent in held.tails:  # a hole that was a leaf but for this run
            self._cut(held, parent)
            held.gone.discard(parent)

    @staticmethod
    def _unset(masks: dict[int, int], value: int, mask: int, bit: int) -> None:
        rest = mask & ~bit
        if rest:
            masks[value] = rest
        else:
            del masks[value]

    def _translate(self, event: KvStored) -> tuple[list[int], int | None] | None:
        """Turn opaque hashes into ours by hashing the tokens; None where the event can't be placed."""
        parent: int | None = None
        if event.parent is not None:
            parent = self._own.get(event.parent & U64)
            if parent is None:
                self.counters.orphans += 1
                return None
        if len(event.tokens) != len(event.hashes) * self.block_size:
            self.counters.refused += 1
            return None
        ours: list[int] = list(chain(local_hashes(event.tokens, self.block_size, event.extras), parent))
        self._own.update(zip((value & U64 for value in event.hashes), ours))
        if len(self._own) > 4096 and len(self._own) > 2 * sum(len(masks) for masks in self._masks.values()):
            held = self._masks
            self._own = {
                engine: own for engine, own in self._own.items() if any(own in masks for masks in held.values())
            }
        return ours, parent

    # --- slots ------------------------------------------------------------------------------------------------------

    def _open_slot(self, target: Target) -> int:
        slot = self._free.pop() if self._free else len(self._targets) + len(self._dirty)
        self._slots[target] = slot
        self._targets[slot] = target
        self._held[slot] = {}
        self._live |= 1 << slot
        return slot

    def _sweep(self, steps: int) -> None:
        """Clean the masks of departed targets, at most so many blocks."""
        while steps and self._sweeping:
            slot, tier, blocks = self._sweeping[-1]
            masks, bit = self._masks[tier], 1 << slot
            for value in blocks:
                mask = masks.get(value, 0)
                if mask & bit:
                    self._unset(masks, value, mask, bit)
                steps -= 1
                if not steps:
                    return
            self._sweeping.pop()
            self._dirty[slot] -= 1
            if not self._dirty[slot]:
                del self._dirty[slot]
                self._free.append(slot)

    def _evict(self) -> None:
        """Stay within the limit: the oldest run of the largest holder goes, leaf by leaf."""
        while self._pairs > self._most:
            slot = max(self._held, key=lambda s: sum(cell.count for cell in self._held[s].values()))
            tier, held = max(self._held[slot].items(), key=lambda item: item[1].count)
            leaves = [tail for tail in held.tails if tail not in held.children][:64]
            if not leaves:
                raise InvariantError(f"slot {slot} holds {held.count} blocks and has no leaf")
            masks, bit = self._masks[tier], 1 << slot
            for leaf in leaves:
                for _ in range(min(64, self._pairs - self._most)):
                    number = held.tails.get(leaf)
                    if number is None or leaf in held.children:
                        break
                    run = held.runs[number][1]
                    mask = masks.get(leaf, 0)
                    if mask & bit:
                        self._unset(masks, leaf, mask, bit)
                        held.count -= 1
                        self._pairs -= 1
                        self.counters.evicted += 1
                    self._cut(held, leaf)
                    if not run:
                        break
                    leaf = run[-1]

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def overlap(self, blocks: Sequence[int], now: Nanos = 0) -> dict[Target, Depth]:
        """Count, per target, how many leading blocks of a prompt it holds.

        Args:
            blocks: chained hashes, shape (n,).
        Returns: targets that hold at least one; the others are absent.
        Cost: O(log n) look-ups per distinct depth, plus n for a target with holes, plus the depth in lower tiers.
        """
        if not blocks:
            return {}
        depths = self._gallop(blocks)
        self._lookups += 1
        if self._audit_every and self._lookups % self._audit_every == 0:
            self.counters.audits += 1
            exact = self._linear(blocks, self._live)
            if exact != depths:
                self.counters.audit_disagreements += 1
                depths = exact
        if self._half_life and depths:
            self._hit(blocks[max(depths.values()) - 1], now)
        targets = self._targets
        lower = self._masks["host"] or self._masks["disk"]
        if not lower:
            return {targets[slot]: Depth(depth) for slot, depth in depths.items()}
        return self._beyond(blocks, depths)

    def _gallop(self, blocks: Sequence[int]) -> dict[int, int]:
        """Return slot -> depth on the device tier."""
        get = self._masks["device"].get
        count = len(blocks)
        found: dict[int, int] = {}
        present = get(blocks[0], 0) & self._live
        if present & self._holed:
            found = self._linear(blocks, present & self._holed)
            present &= ~self._holed
        low = 0  # the last block that all of `present` hold
        while present:
            step, high = 1, count
            while low + step < count:
                if get(blocks[low + step], 0) & present == present:
                    low += step
                    step *= 2
                else:
                    high = low + step
                    break
            while high - low > 1:
                middle = (low + high) // 2
                if middle < count and get(blocks[middle], 0) & present == present:
                    low = middle
                else:
                    high = middle
            depth = low + 1
            rest = get(blocks[depth], 0) & present if depth < count else 0
            dropped = present & ~rest
            while dropped:
                lowest = dropped & -dropped
                found[lowest.bit_length() - 1] = depth
                dropped ^= lowest
            present = rest
            low = depth
        return found

    def _linear(self, blocks: Sequence[int], present: int) -> dict[int, int]:
        """The same by looking at every block: the truth that galloping is audited with."""
        get = self._masks["device"].get
        found: dict[int, int] = {}
        for depth, value in enumerate(blocks):
            rest = get(value, 0) & present
            if rest != present:
                dropped = present & ~rest
                while dropped:
                    lowest = dropped & -dropped
                    if depth:
                        found[lowest.bit_length() - 1] = depth
                    dropped ^= lowest
                present = rest
                if not present:
                    return found
        while present:
            lowest = present & -present
            found[lowest.bit_length() - 1] = len(blocks)
            present ^= lowest
        return found

    def _beyond(self, blocks: Sequence[int], depths: dict[int, int]) -> dict[Target, Depth]:
        """Go on from each target's device depth through its lower tiers."""
        device, host, disk = (self._masks[tier] for tier in TIERS)
        found: dict[Target, Depth] = {}
        first = (host.get(blocks[0], 0) | disk.get(blocks[0], 0)) & self._live
        slots = {*depths, *(slot for slot in self._targets if first >> slot & 1)}
        for slot in sorted(slots):
            bit = 1 << slot
            depth = depths.get(slot, 0)
            in_host = in_disk = 0
            for value in blocks[depth:]:
                if host.get(value, 0) & bit or device.get(value, 0) & bit:
                    in_host += 1
                elif disk.get(value, 0) & bit:
                    in_disk += 1
                else:
                    break
            if depth or in_host or in_disk:
                found[self._targets[slot]] = Depth(depth, in_host, in_disk)
        return found

    # --- what else can be asked -------------------------------------------------------------------------------------

    def held(self, target: Target, tier: Tier = "device") -> set[int]:
        """Return every block that a target is claimed to hold in a tier. Cost: walks them all."""
        slot = self._slots.get(target)
        cell = None if slot is None else self._held[slot].get(tier)
        return set() if cell is None else set(cell.hashes())

    def dump(self, target: Target) -> Iterator[KvEvent]:
        """Yield native events from which an empty index becomes equal for this target; parents come first."""
        slot = self._slots.get(target)
        for tier, cell in {} if slot is None else self._held[slot].items():
            for parent, run in cell.runs.values():
                yield KvStored(hashes=list(run), parent=parent, block_size=self.block_size, tier=tier)
            if cell.gone:
                yield KvRemoved(hashes=sorted(cell.gone), tier=tier)

    def hits(self, block: int, now: Nanos) -> float:
        """Return the decayed number of look-ups whose deepest held block this was."""
        count, at = self._hits.get(block, (0.0, now))
        return float(count * 0.5 ** ((now - at) / self._half_life)) if self._half_life else 0.0

    def _hit(self, block: int, now: Nanos) -> None:
        self._hits[block] = (self.hits(block, now) + 1.0, now)
        if len(self._hits) > 65_536:
            self._hits = {b: entry for b, entry in self._hits.items() if self.hits(b, now) >= 0.5}

    # --- duties -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "targets": [
                [list(target), self._native.get(target, False), [msgspec.to_builtins(e) for e in self.dump(target)]]
                for target in sorted(self._slots, key=self._slots.__getitem__)
            ],
            "own": [[engine, own] for engine, own in self._own.items()],
            "counters": msgspec.to_builtins(self.counters),
            "lookups": self._lookups,
            "hits": [[block, count, at] for block, (count, at) in self._hits.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["block_size"], blocks_max=self._most, audit_every=self._audit_every, hits_half_life=self._half_life
        )
        for raw, native, events in state["targets"]:
            target = Target(*raw)
            self.join(target, native=True)
            for event in events:
                self.apply(target, msgspec.convert(event, KvStored | KvRemoved | KvCleared))
            self._native[target] = native
        self._own = dict(state["own"])
        self.counters = msgspec.convert(state["counters"], IndexCounters)
        self._lookups = state["lookups"]
        self._hits = {block: (count, at) for block, count, at in state["hits"]}

    def check(self) -> None:
        """Compare masks and runs, both ways. Cost: walks everything."""
        pairs = 0
        claimed: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        for slot, cells in self._held.items():
            for tier, cell in cells.items():
                blocks = list(cell.hashes())
                pairs += len(blocks)
                if len(set(blocks)) != len(blocks) or len(blocks) != cell.count:
                    raise InvariantError(f"slot {slot} holds a block twice, or miscounts {cell.count}")
                for value in blocks:
                    claimed[tier][value] = claimed[tier].get(value, 0) | 1 << slot
                if {run[-1] for _, run in cell.runs.values()} != set(cell.tails):
                    raise InvariantError(f"slot {slot} has tails that end no run")
        live = self._live
        for tier, masks in self._masks.items():
            if {v: m & live for v, m in masks.items() if m & live} != claimed[tier]:
                raise InvariantError(f"masks and runs of tier {tier} differ")
            if any(mask == 0 for mask in masks.values()):
                raise InvariantError(f"tier {tier} keeps a block that nobody holds")
        if pairs != self._pairs:
            raise InvariantError(f"{pairs} pairs by runs, {self._pairs} counted")
