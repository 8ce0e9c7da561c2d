"""Moves between the host tier and what is below it: `Fetches` brings blocks up, `LowerWrites` takes them down."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from penstock.kernel.machine import Nanos, nanos
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.block_manager import BlockColumns
from penstock_kv.blocks.tiers.tier_events import BlockHints, MoveEnded, TierName
from penstock_kv.blocks.tiers.tier_moves import BlockTier, TierMoves
from penstock_kv.blocks.tiers.tier_settings import LOAD_DEADLINE, PREFETCH_DEADLINE, WRITE_DEADLINE
from penstock_kv.blocks.tiers.tier_state import LOWER_TIERS, Edge, Fetch, LowerQueue, LowerTier, WriteMove


class Source(NamedTuple):
    """Where a block is that the host tier lacks. ``fetch``: id of the one that brings it already, or 0."""

    tier: TierName
    peer: str
    fetch: int


class Arrival(NamedTuple):
    """What a fetch brought for one job: positions in the job."""

    job: int
    fetch: int
    origin: TierName
    arrived: list[int]
    missing: list[int]
    reason: str


class Fetches:
    """Moves into the host tier. Those that a load wants go before those that are prefetched."""

    def __init__(self, moves: TierMoves) -> None:
        self._moves = moves
        self._lower = [
            (moves.tiers[name].index, moves.edge(name, "host")[1], Source(name, "", 0))
            for name in LOWER_TIERS
            if name in moves.tiers
        ]

    # --- plan

    def source(self, now: Nanos, key: BlockKey) -> Source | str:
        """Return where a block can be fetched, or why it can't."""
        moves = self._moves
        id = moves.state.incoming.get(key)
        if id is not None:
            fetch = moves.state.moves[id]
            return Source(fetch.source, fetch.peer, id) if isinstance(fetch, Fetch) else "arriving"
        reason = "absent"
        for index, edge, source in self._lower:
            if key in index:
                if now >= edge.rest_until:
                    return source
                reason = "resting"
        block = moves.state.peer_blocks.get(key)
        if block is not None and block.peer and block.until > now:
            if not moves.edge("peer", "host", block.peer)[1].rests(now):
                return Source("peer", block.peer, 0)
            reason = "resting"
        return reason

    def want(
        self,
        now: Nanos,
        keys: Sequence[BlockKey],
        wanted: Sequence[tuple[int, Source]],
        hints: BlockHints,
        job: int | None,
    ) -> list[int]:
        """Queue fetches of blocks, or join those that there are.

        Args:
            wanted: positions in ``keys``, ascending, and where they are.
            job: who waits; None is a prefetch.
        Returns: ids of the fetches that ``job`` waits for.
        """
        state, size = self._moves.state, self._moves.settings.move_blocks
        ids: dict[int, None] = {}
        batch: list[int] = []
        of: Source | None = None
        for position, source in wanted:
            if batch and (source != of or len(batch) == size):
                ids[self._queue_fetch(now, keys, batch, of, hints, job)] = None
                batch = []
            if source.fetch:
                fetch = state.moves[source.fetch]
                assert isinstance(fetch, Fetch), "what is incoming from below is a fetch"
                if job is None:
                    fetch.prefetch = True
                else:
                    self._promote(source.fetch, fetch)
                    fetch.waiters.setdefault(job, []).append((fetch.blocks.keys.index(keys[position]), position))
                ids[source.fetch] = None
            else:
                batch.append(position)
                of = source
        if batch:
            ids[self._queue_fetch(now, keys, batch, of, hints, job)] = None
        return list(ids)

    def _queue_fetch(
        self,
        now: Nanos,
        keys: Sequence[BlockKey],
        positions: list[int],
        source: Source | None,
        hints: BlockHints,
        job: int | None,
    ) -> int:
        """Make a fetch of blocks that are in one place."""
        assert source is not None
        moves = self._moves
        chosen = [keys[position] for position in positions]
        until = now + nanos(hints.pin) if hints.pin else 0
        handle = 0
        if source.tier == "peer":
            before = [keys[position - 1] if position else None for position in positions]
            blocks = BlockColumns(
                keys=chosen, parents=before, priorities=[hints.priority] * len(chosen), pins=[until] * len(chosen)
            )
        else:
            tier = moves.tiers[source.tier]
            tier.mark(chosen, hints, now)
            handle = tier.hold(chosen, now)
            blocks = tier.manager.columns(tier.slots(handle))
        name, edge = moves.edge(source.tier, "host", source.peer)
        id = moves.new_id()
        fetch = Fetch(edge=name, source=source.tier, peer=source.peer, blocks=blocks, source_handle=handle)
        if job is None:
            fetch.prefetch = True
            edge.ahead.append(id)
        else:
            fetch.waiters[job] = list(enumerate(positions))
            edge.queue.append(id)
            edge.queued += len(chosen) * moves.settings.block_bytes
        moves.state.moves[id] = fetch
        moves.state.incoming.update(dict.fromkeys(chosen, id))
        return id

    def _promote(self, id: int, fetch: Fetch) -> None:
        """Move a prefetch that a load wants now before the others."""
        edge = self._moves.state.edges[fetch.edge]
        if not fetch.handle and id in edge.ahead:
            edge.ahead.remove(id)
            edge.queue.append(id)
            edge.queued += len(fetch.blocks.keys) * self._moves.settings.block_bytes

    # --- post, end

    def pump(self, now: Nanos) -> list[Arrival]:
        """Post what there is room for; returns what can't be fetched."""
        arrivals: list[Arrival] = []
        for edge in list(self._moves.state.edges.values()):
            for queue in (edge.queue, edge.ahead):
                while queue:
                    fetch = self._moves.state.moves[queue[0]]
                    assert isinstance(fetch, Fetch), "queues have fetches"
                    reason = self._obstacle(now, edge, fetch)
                    if reason == "busy":
                        break
                    id = self._unqueue(edge, queue, 0, fetch)
                    if reason:
                        arrivals += self._drop_fetch(id, fetch, reason)
                    else:
                        self._post(now, id, fetch)
        return arrivals

    def _obstacle(self, now: Nanos, edge: Edge, fetch: Fetch) -> str:
        """Return why a fetch can't be posted; ``busy`` is the only reason that passes."""
        moves = self._moves
        count = len(fetch.blocks.keys)
        if edge.rests(now):
            return "resting"
        if edge.in_flight and edge.in_flight + count * moves.settings.block_bytes > moves.settings.bytes_in_flight:
            return "busy"
        if moves.room(now) < count:  # moves that are under way free slots; pins do so only when their time comes
            return "busy" if moves.host.manager.active and fetch.waiters else "full"
        return ""

    def _post(self, now: Nanos, id: int, fetch: Fetch) -> None:
        fetch.handle = self._moves.host.take(len(fetch.blocks.keys), now)
        self._moves.post(id, fetch, now + (LOAD_DEADLINE if fetch.waiters else PREFETCH_DEADLINE))

    def ended(self, id: int, fetch: Fetch, event: MoveEnded) -> tuple[list[BlockKey], list[Arrival]]:
        """Register what arrived: keys that are new in the host tier, and what that is for each job."""
        moves, host = self._moves, self._moves.host
        moves.arrived(id, fetch.blocks.keys)
        if fetch.source_handle:
            source = moves.tiers[fetch.source]
            source.invalidate(fetch.source_handle, event.corrupt, fetch.blocks)
            source.release(fetch.source_handle)
        else:  # what a peer did not bring now is not expected from it again
            for key, done in zip(fetch.blocks.keys, event.done, strict=True):
                if not done:
                    moves.state.peer_blocks.pop(key, None)
        if fetch.void:
            host.release(fetch.handle)
            return [], []
        fresh = host.register(fetch.handle, fetch.blocks, event.done)
        if fetch.prefetch:
            moves.state.counts.prefetched += len(fresh)
            moves.state.ahead.update(dict.fromkeys(fresh))
        reason = "corrupt" if event.corrupt else "failed"
        return fresh, [self._arrival(id, fetch, job, event.done, reason) for job in fetch.waiters]

    def late(self, now: Nanos, id: int, fetch: Fetch) -> list[Arrival]:
        """Let nobody wait for a fetch whose deadline has passed."""
        self._moves.late(now, fetch)
        return self.void(id, fetch, "late", void=False)

    def void(self, id: int, fetch: Fetch, reason: str, *, void: bool = True) -> list[Arrival]:
        """Let nobody wait for a fetch, nor anybody find it; where ``void``, what it brings is not registered."""
        if not fetch.handle:
            edge = self._moves.state.edges[fetch.edge]
            queue = edge.queue if id in edge.queue else edge.ahead
            self._unqueue(edge, queue, queue.index(id), fetch)
            return self._drop_fetch(id, fetch, reason)
        fetch.void = fetch.void or void
        arrivals = [self._arrival(id, fetch, job, [], reason) for job in fetch.waiters]
        fetch.waiters = {}
        self._moves.arrived(id, fetch.blocks.keys)
        return arrivals

    def leave(self, id: int, job: int, end: int) -> bool:
        """Let a job wait no more for blocks from ``end`` on; returns whether it waits for others of this fetch."""
        fetch = self._moves.state.moves.get(id)
        if not isinstance(fetch, Fetch):  # it was dropped just now, and its arrival is not handled yet
            return False
        rest = [waiter for waiter in fetch.waiters.pop(job, []) if waiter[1] < end]
        if rest:
            fetch.waiters[job] = rest
            return True
        if not fetch.waiters and not fetch.prefetch:
            if not fetch.handle:
                self.void(id, fetch, "cancelled")
            else:
                self._moves.cancel(id)
                self._moves.arrived(id, fetch.blocks.keys)
        return False

    def first_waiting(self, id: int, job: int) -> int:
        """Return a job's first position that waits for a fetch."""
        fetch = self._moves.state.moves[id]
        assert isinstance(fetch, Fetch), "jobs wait for fetches"
        return fetch.waiters[job][0][1]

    # --- helpers

    def _unqueue(self, edge: Edge, queue: list[int], at: int, fetch: Fetch) -> int:
        if queue is edge.queue:
            edge.queued -= len(fetch.blocks.keys) * self._moves.settings.block_bytes
        return queue.pop(at)

    def _drop_fetch(self, id: int, fetch: Fetch, reason: str) -> list[Arrival]:
        """Forget a fetch that was never posted."""
        moves = self._moves
        moves.host.counts.skip(reason, len(fetch.blocks.keys))
        moves.arrived(id, fetch.blocks.keys)
        if fetch.source_handle:
            moves.tiers[fetch.source].release(fetch.source_handle)
        del moves.state.moves[id]
        return [self._arrival(id, fetch, job, [], reason) for job in fetch.waiters]

    def _arrival(self, id: int, fetch: Fetch, job: int, done: Sequence[bool], reason: str) -> Arrival:
        arrived = [position for number, position in fetch.waiters[job] if done and done[number]]
        missing = [position for number, position in fetch.waiters[job] if not (done and done[number])]
        return Arrival(job, id, fetch.source, arrived, missing, reason)


class LowerWrites:
    """Host to disk and object store. What can't be written is skipped and counted; it is never waited for.

    With write-through and selective writes a key waits in a queue and holds nothing: where the host tier has evicted
    the block when its turn comes, it is skipped. With write-back, blocks are evicted ahead of need: their slots stay
    taken until their bytes are below, and the host tier gives only empty slots to others.
    """

    def __init__(self, moves: TierMoves) -> None:
        self._moves = moves
        self._targets = [
            (name, moves.tiers[name], *moves.edge("host", name)) for name in LOWER_TIERS if name in moves.tiers
        ]
        for name, *_ in self._targets:
            moves.state.lower.setdefault(name, LowerQueue())

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """Take note of blocks that are new in the host tier."""
        if self._targets and keys and self._moves.settings.write == "through":
            self._enqueue(keys)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Take note of blocks in the host tier that were used again."""
        if self._targets and keys and self._moves.settings.write == "selective":
            self._enqueue(keys)

    def _enqueue(self, keys: Sequence[BlockKey]) -> None:
        limit = self._moves.host.manager.table.slots
        for name, tier, _, _ in self._targets:
            queue = self._moves.state.lower[name]
            index, waiting, writing = tier.index, queue.waiting, queue.writing
            for key in keys:
                if key not in index and key not in writing:
                    waiting[key] = None
            while len(waiting) > limit:  # the oldest has long left the host tier, or soon will
                del waiting[next(iter(waiting))]
                tier.counts.skip("busy", 1)

    def pump(self, now: Nanos) -> None:
        """Post what there is room for."""
        if not self._targets:
            return
        if self._moves.evicts_ahead:
            self._evict_ahead(now)
            return
        for name, tier, edge_name, edge in self._targets:
            queue = self._moves.state.lower[name]
            while queue.waiting:
                if edge.rests(now):
                    tier.counts.skip("resting", len(queue.waiting))
                    queue.waiting.clear()
                    break
                count = self._allowed(edge, len(queue.waiting))
                if not count:
                    break
                self._write(now, name, tier, edge_name, list(islice(queue.waiting, count)))

    def _allowed(self, edge: Edge, wanted: int) -> int:
        """Return how many blocks may go now: a whole move or all there are, rather than a part of one."""
        settings = self._moves.settings
        count = min(wanted, settings.move_blocks)
        fits = edge.in_flight + count * settings.block_bytes <= settings.bytes_in_flight
        return count if fits or not edge.in_flight else 0

    def _write(self, now: Nanos, name: LowerTier, tier: BlockTier, edge_name: str, keys: list[BlockKey]) -> None:
        moves, queue = self._moves, self._moves.state.lower[name]
        host = moves.host
        for key in keys:
            del queue.waiting[key]
        above, below = host.index, tier.index
        alive = [key for key in keys if key in above and key not in below]
        tier.counts.skip("evicted", len(keys) - len(alive))
        room = min(len(alive), tier.manager.available(now))
        tier.counts.skip("full", len(alive) - room)
        if room:
            host_handle = host.hold(alive[:room], now)
            blocks = host.manager.columns(host.slots(host_handle))
            self._post(now, name, tier, edge_name, blocks, host_handle)

    def _post(
        self, now: Nanos, name: LowerTier, tier: BlockTier, edge_name: str, blocks: BlockColumns, host_handle: int
    ) -> None:
        moves = self._moves
        handle, id = tier.take(len(blocks.keys), now), moves.new_id()
        moves.state.lower[name].writing.update(dict.fromkeys(blocks.keys, id))
        move = WriteMove(edge=edge_name, target=name, blocks=blocks, host_handle=host_handle, handle=handle)
        moves.post(id, move, now + WRITE_DEADLINE)

    def ended(self, id: int, move: WriteMove, event: MoveEnded) -> None:
        """Register what arrived."""
        moves, tier = self._moves, self._moves.tiers[move.target]
        writing = moves.state.lower[move.target].writing
        for key in move.blocks.keys:
            if writing.get(key) == id:
                del writing[key]
        moves.host.invalidate(move.host_handle, event.corrupt, move.blocks)
        moves.host.release(move.host_handle)
        if moves.evicts_ahead:
            moves.state.demoting -= len(move.blocks.keys)
        if move.void:
            tier.discard(move.handle, move.blocks.keys)
        else:
            tier.register(move.handle, move.blocks, event.done)

    def _evict_ahead(self, now: Nanos) -> None:
        """Keep the watermark's number of host slots empty, and write what would be lost."""
        moves = self._moves
        state, host, manager = moves.state, moves.host, moves.host.manager
        while (count := moves.settings.watermark - manager.free - state.demoting) > 0:
            target = self._write_target(now)
            if target is None:  # rather lose old blocks than refuse new ones for as long as a device hangs
                handle, _ = host.vacate(count, _nothing_is_dirty, now)
                host.release(handle)
                host.counts.lost += sum(map(self._dirty, host.vacated))
                return
            name, tier, edge_name, edge = target
            count = min(self._allowed(edge, count), tier.manager.available(now))
            if not count:
                return
            handle, blocks = host.vacate(count, self._dirty, now)
            if not host.vacated:
                return host.release(handle)
            if blocks.keys:
                state.demoting += len(blocks.keys)
                self._post(now, name, tier, edge_name, blocks, handle)
            else:
                host.release(handle)

    def _write_target(self, now: Nanos) -> tuple[LowerTier, BlockTier, str, Edge] | None:
        for target in self._targets:
            if not target[3].rests(now) and target[1].manager.available(now):
                return target
        return None

    def _dirty(self, key: BlockKey) -> bool:
        """Return whether a block is in no lower tier."""
        return not any(key in tier.index for _, tier, _, _ in self._targets)


def _nothing_is_dirty(key: BlockKey) -> bool:
    return False
