"""`BlockTier`: one tier's blocks with their handles, and what is announced of them."""

from collections.abc import Callable, Sequence

from penstock.blocks.block_handle import BlockHandle
from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockColumns, BlockManager
from penstock.blocks.tiers.tier_counts import TierCounts
from penstock.blocks.tiers.tier_events import (
    BlockHints,
    BlocksRemoved,
    BlocksStored,
    ForgetRecords,
    TierFound,
    TierName,
)
from penstock.blocks.tiers.tier_settings import TierSettings
from penstock.kernel.machine import Effect, Nanos, Snapshot, nanos


class BlockTier:
    """One tier. Handles are numbers, as a snapshot has them.

    Args:
        effects: where announcements go.
    """

    def __init__(
        self, name: TierName, blocks: int, settings: TierSettings, counts: TierCounts, effects: list[Effect]
    ) -> None:
        self.name = name
        self.manager = BlockManager(blocks, settings.block_tokens, settings.order)
        self.counts = counts
        self.survives_restarts = name != "host"
        self.ranked = settings.order == "priority"
        self._effects = effects
        self._handles: dict[int, BlockHandle] = {}
        self.vacated: list[BlockKey] = []

    def restore(self, snapshot: Snapshot) -> None:
        """Take the manager's state and its open handles."""
        self.manager.restore(snapshot)
        self._handles = {opened.id: self.manager.reopen(opened.id) for opened in self.manager.open_handles()}

    @property
    def handles(self) -> set[int]:
        """Open handles."""
        return set(self._handles)

    @property
    def index(self) -> dict[BlockKey, int]:
        """Slot of each registered key. Read only."""
        return self.manager.table.index

    def slots(self, handle: int) -> list[int]:
        return self._handles[handle].slots

    def generations(self, handle: int) -> list[int]:
        generation = self.manager.table.generation
        return [generation[slot] for slot in self._handles[handle].slots]

    # --- hold, take, release

    def hold(self, keys: Sequence[BlockKey], now: Nanos) -> int:
        """Hold registered blocks, all of ``keys``, and count them as used."""
        return self._opened(self.manager.match(keys, self.name, now))

    def touch(self, keys: Sequence[BlockKey], now: Nanos, hints: BlockHints) -> list[BlockKey]:
        """Count blocks as used, with what a request says of them; returns those that are here."""
        index = self.index
        here = [key for key in keys if key in index]
        if here:
            self.mark(here, hints, now)
            self.manager.match(here, self.name, now).release()
        return here

    def mark(self, keys: Sequence[BlockKey], hints: BlockHints, now: Nanos) -> None:
        """Give registered blocks at least the priority and the pin of a request."""
        if not hints.priority and not hints.pin:
            return
        if not self.ranked:
            self.counts.hints_ignored += len(keys)
            return
        if hints.priority:
            self.manager.prefer(keys, hints.priority)
        if hints.pin:
            for key in keys:
                self.pin(key, now + nanos(hints.pin))

    def take(self, count: int, now: Nanos) -> int:
        """Take empty slots, at most as many as are available; blocks that give way are announced."""
        handle = self.manager.allocate(count, self.name, now)
        assert handle is not None, "nobody takes more than there is room for"
        self._removed(handle.evicted)
        return self._opened(handle)

    def vacate(self, count: int, dirty: Callable[[BlockKey], bool], now: Nanos) -> tuple[int, BlockColumns]:
        """Evict up to ``count`` blocks (`vacated`); returns a handle of the dirty ones, and what they were."""
        handle, columns = self.manager.vacate(count, dirty, self.name, now)
        self.vacated = [key for _, key in handle.evicted]
        self._removed(handle.evicted)
        return self._opened(handle), columns

    def release(self, handle: int) -> None:
        self._handles.pop(handle).release()

    # --- register, pin

    def register(self, handle: int, columns: BlockColumns, done: Sequence[bool]) -> list[BlockKey]:
        """Register the blocks of a handle that arrived, announce them, and release all.

        Returns: keys that are new here.
        """
        blocks = self._handles.pop(handle)
        own = blocks.slots.copy()
        manager, keys, parents, priorities = self.manager, columns.keys, columns.parents, columns.priorities
        fresh: list[BlockKey] = []
        void: list[int] = []
        first, count = 0, len(keys)
        while first < count:
            if not done[first]:
                void.append(first)
                first += 1
                continue
            end = first + 1
            while end < count and done[end] and parents[end] == keys[end - 1] and priorities[end] == priorities[first]:
                end += 1
            manager.apply(blocks, first, end - first)
            run = keys[first:end]
            duplicates = {
                duplicate.position
                for duplicate in manager.register(
                    blocks, run, first=first, parent=parents[first], priority=priorities[first]
                )
            }
            if duplicates:
                void += sorted(duplicates)
                for position in range(first, end):
                    if position not in duplicates:
                        self._stored([keys[position]], parents[position])
                        fresh.append(keys[position])
            else:
                self._stored(run, parents[first])
                fresh += run
            first = end
        if self.ranked:
            for position, until in enumerate(columns.pins):
                if until and done[position]:
                    self.pin(keys[position], until)
        else:
            self.counts.hints_ignored += sum(map(bool, columns.pins)) or sum(map(bool, priorities))
        blocks.release()
        self._forget([(own[position], keys[position]) for position in void])
        return fresh

    def discard(self, handle: int, keys: Sequence[BlockKey]) -> None:
        """Release slots into which something may have been written that must not come back."""
        self._forget(list(zip(self.slots(handle), keys, strict=True)))
        self.release(handle)

    def pin(self, key: BlockKey, until: Nanos) -> None:
        """Keep a block at least until then."""
        table = self.manager.table
        slot = self.index[key]
        if until > table.pinned_until[slot]:
            self.manager.pin((key,), until)

    # --- lose

    def invalidate(self, handle: int, positions: Sequence[int], columns: BlockColumns) -> None:
        """Take blocks of a handle whose bytes are wrong out of the index, unless they are others by now."""
        slots = self.slots(handle)
        wrong = [
            (slots[position], columns.keys[position])
            for position in positions
            if self.index.get(columns.keys[position]) == slots[position]
        ]
        for _, key in wrong:
            self.manager.invalidate(key)
        self._removed(wrong)

    def clear(self) -> None:
        """Drop all blocks; those that somebody holds lose their keys, and their slots are free later."""
        lost = self.manager.clear_idle()
        active = [(slot, key) for key, slot in self.index.items()]
        for _, key in active:
            self.manager.invalidate(key)
        self._removed(lost + active)

    def adopt(self, event: TierFound) -> None:
        """Take what was here before a restart; records that can't be are forgotten."""
        keys, parents = event.keys, event.parents
        refused = self.manager.adopt(keys, event.slots, event.generations, parents)
        self._forget([(event.slots[position], keys[position]) for position in refused])
        without = set(refused)
        run: list[BlockKey] = []
        first: BlockKey | None = None
        for position, key in enumerate(keys):
            if position in without:
                continue
            if run and parents[position] == run[-1]:
                run.append(key)
                continue
            if run:
                self._stored(run, first)
            run, first = [key], parents[position]
        if run:
            self._stored(run, first)

    # --- helpers

    def _opened(self, handle: BlockHandle) -> int:
        self._handles[handle.id] = handle
        return handle.id

    def _stored(self, keys: list[BlockKey], parent: BlockKey | None) -> None:
        self.counts.stored += len(keys)
        self._effects.append(BlocksStored(tier=self.name, keys=keys, parent=parent))

    def _removed(self, blocks: list[tuple[int, BlockKey]]) -> None:
        if blocks:
            self.counts.removed += len(blocks)
            self._effects.append(BlocksRemoved(tier=self.name, keys=[key for _, key in blocks]))
            self._forget(blocks)

    def _forget(self, blocks: list[tuple[int, BlockKey]]) -> None:
        if blocks and self.survives_restarts:
            slots, keys = zip(*blocks, strict=True)
            self._effects.append(ForgetRecords(tier=self.name, slots=slots, keys=keys))
