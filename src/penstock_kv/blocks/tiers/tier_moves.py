"""The tiers of one engine, `BlockTier`, and what all moves between them share, `TierMoves`."""

import heapq
from collections.abc import Callable, Sequence

from penstock.kernel.machine import Effect, Nanos, Snapshot, nanos
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.block_manager import BlockColumns, BlockManager
from penstock_kv.blocks.block_table import BlockHandle
from penstock_kv.blocks.tiers.tier_events import (
    BlockHints,
    BlocksRemoved,
    BlocksStored,
    CancelMove,
    ForgetRecords,
    Move,
    MoveEnded,
    Place,
    TierFound,
    TierName,
)
from penstock_kv.blocks.tiers.tier_settings import REST, TierSettings
from penstock_kv.blocks.tiers.tier_state import (
    Edge,
    Fetch,
    LoadMove,
    OpenMove,
    StoreMove,
    TierCounts,
    TierState,
    WriteMove,
)


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
        return self._keep_handle(self.manager.match(keys, self.name, now))

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
        self._announce_removed(handle.evicted)
        return self._keep_handle(handle)

    def vacate(self, count: int, dirty: Callable[[BlockKey], bool], now: Nanos) -> tuple[int, BlockColumns]:
        """Evict up to ``count`` blocks (`vacated`); returns a handle of the dirty ones, and what they were."""
        handle, columns = self.manager.vacate(count, dirty, self.name, now)
        self.vacated = [key for _, key in handle.evicted]
        self._announce_removed(handle.evicted)
        return self._keep_handle(handle), columns

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
                        self._announce_stored([keys[position]], parents[position])
                        fresh.append(keys[position])
            else:
                self._announce_stored(run, parents[first])
                fresh += run
            first = end
        if self.ranked:
            for position, until in enumerate(columns.pins):
                if until and done[position]:
                    self.pin(keys[position], until)
        else:
            self.counts.hints_ignored += sum(map(bool, columns.pins)) or sum(map(bool, priorities))
        blocks.release()
        self._forget_records([(own[position], keys[position]) for position in void])
        return fresh

    def discard(self, handle: int, keys: Sequence[BlockKey]) -> None:
        """Release slots into which something may have been written that must not come back."""
        self._forget_records(list(zip(self.slots(handle), keys, strict=True)))
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
        self._announce_removed(wrong)

    def clear(self) -> None:
        """Drop all blocks; those that somebody holds lose their keys, and their slots are free later."""
        lost = self.manager.clear_idle()
        active = [(slot, key) for key, slot in self.index.items()]
        for _, key in active:
            self.manager.invalidate(key)
        self._announce_removed(lost + active)

    def adopt(self, event: TierFound) -> None:
        """Take what was here before a restart; records that can't be are forgotten."""
        keys, parents = event.keys, event.parents
        refused = self.manager.adopt(keys, event.slots, event.generations, parents)
        self._forget_records([(event.slots[position], keys[position]) for position in refused])
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
                self._announce_stored(run, first)
            run, first = [key], parents[position]
        if run:
            self._announce_stored(run, first)

    # --- helpers

    def _keep_handle(self, handle: BlockHandle) -> int:
        self._handles[handle.id] = handle
        return handle.id

    def _announce_stored(self, keys: list[BlockKey], parent: BlockKey | None) -> None:
        self.counts.stored += len(keys)
        self._effects.append(BlocksStored(tier=self.name, keys=keys, parent=parent))

    def _announce_removed(self, blocks: list[tuple[int, BlockKey]]) -> None:
        if blocks:
            self.counts.removed += len(blocks)
            self._effects.append(BlocksRemoved(tier=self.name, keys=[key for _, key in blocks]))
            self._forget_records(blocks)

    def _forget_records(self, blocks: list[tuple[int, BlockKey]]) -> None:
        if blocks and self.survives_restarts:
            slots, keys = zip(*blocks, strict=True)
            self._effects.append(ForgetRecords(tier=self.name, slots=slots, keys=keys))


class TierMoves:
    """Posts moves and takes their ends: ids, bytes in flight, deadlines, measured speeds and rests.

    Args:
        tiers: those that there are; ``host`` is one of them.
        effects: where moves and announcements go, in order.
    """

    def __init__(
        self, settings: TierSettings, state: TierState, tiers: dict[TierName, BlockTier], effects: list[Effect]
    ) -> None:
        self.settings = settings
        self.state = state
        self.tiers = tiers
        self.host = tiers["host"]
        self.effects = effects
        self.evicts_ahead = settings.write == "back" and len(tiers) > 1

    def room(self, now: Nanos) -> int:
        """Return how many slots of the host tier can be taken at once."""
        manager = self.host.manager
        return manager.free if self.evicts_ahead else manager.available(now)

    def has(self, key: BlockKey) -> bool:
        """Return whether a block is in a tier, or on its way to the host tier."""
        return key in self.state.incoming or any(key in tier.index for tier in self.tiers.values())

    def arrived(self, id: int, keys: Sequence[BlockKey]) -> None:
        """Take note that a move brings these blocks into the host tier no more."""
        incoming = self.state.incoming
        for key in keys:
            if incoming.get(key) == id:
                del incoming[key]

    def edge(self, source: Place, target: Place, peer: str = "") -> tuple[str, Edge]:
        """Return the edge between two places, and its name."""
        name = f"{source}>{target} {peer}" if peer else f"{source}>{target}"
        edge = self.state.edges.get(name)
        if edge is None:
            edge = self.state.edges[name] = Edge(source=source, target=target, peer=peer)
        return name, edge

    def new_id(self) -> int:
        id = self.state.next_id
        self.state.next_id = id + 1
        return id

    def timer(self, at: Nanos, what: str, id: int) -> None:
        heapq.heappush(self.state.timers, (at, what, id))

    def post(self, id: int, move: OpenMove, deadline: Nanos, rows: Sequence[int] = ()) -> None:
        """Post a move, which is open until `ended`. ``rows``: of the engine's region, for one that it takes part in."""
        sources, targets, generations = self._slots_of(move, rows)
        edge = self.state.edges[move.edge]
        edge.in_flight += len(sources) * self.settings.block_bytes
        self.state.moves[id] = move
        if isinstance(move, Fetch | WriteMove):  # those of the engine's rows end nobody's wait before they are over
            self.timer(deadline, "move", id)
        self.effects.append(
            Move(
                id=id,
                source=edge.source,
                target=edge.target,
                keys=move.blocks.keys,
                source_slots=sources,
                target_slots=targets,
                generations=generations,
                deadline=deadline,
                peer=edge.peer,
                parents=move.blocks.parents if isinstance(move, WriteMove) else (),
            )
        )

    def _slots_of(self, move: OpenMove, rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int], list[int]]:
        """Return a move's slots at the source and the target, and the generations that go with it."""
        host = self.host
        if isinstance(move, WriteMove):
            tier = self.tiers[move.target]
            return host.slots(move.host_handle), tier.slots(move.handle), tier.generations(move.handle)
        slots, generations = host.slots(move.handle), host.generations(move.handle)
        if isinstance(move, LoadMove):
            return slots, rows, generations
        if isinstance(move, StoreMove):
            return rows, slots, generations
        if move.source == "peer":
            return [-1] * len(slots), slots, [0] * len(slots)
        source, handle = self.tiers[move.source], move.source_handle
        return source.slots(handle), slots, source.generations(handle)

    def ended(self, now: Nanos, event: MoveEnded) -> OpenMove | None:
        """Close a move; None where no such move is posted."""
        move = self.state.moves.get(event.id)
        if move is None or (isinstance(move, Fetch) and not move.handle):
            self.state.counts.unknown += 1
            return None
        del self.state.moves[event.id]
        edge, block_bytes = self.state.edges[move.edge], self.settings.block_bytes
        count = len(move.blocks.keys)
        edge.in_flight -= count * block_bytes
        arrived = sum(event.done)
        source, target = self.state.tiers.get(edge.source), self.state.tiers.get(edge.target)
        for counts in (source, target):
            if counts is not None:
                counts.failed += count - arrived
        if source is not None:
            source.corrupt += len(event.corrupt)
            source.bytes_out += arrived * block_bytes
        if target is not None:
            target.bytes_in += arrived * block_bytes
        if arrived == count and event.seconds > 0:
            edge.measured(now, count * block_bytes, event.seconds)
        elif not arrived and not event.corrupt and not move.cancelled and isinstance(move, Fetch | WriteMove):
            edge.rest_until = now + REST
        return move

    def cancel(self, id: int) -> None:
        """Say that nobody wants a posted move any more."""
        move = self.state.moves[id]
        if not move.cancelled:
            move.cancelled = True
            self.effects.append(CancelMove(id=id))

    def late(self, now: Nanos, move: Fetch | WriteMove) -> None:
        """Take note that a move's deadline has passed; its slots stay busy until it ends."""
        edge = self.state.edges[move.edge]
        move.late = True
        edge.rest_until = now + REST
        self.state.tiers[edge.target if isinstance(move, WriteMove) else edge.source].late += 1
