"""`Fetches`: brings blocks from disks, the object store and peers into the host tier, once for all who want them."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockColumns
from penstock.blocks.tiers.edge import Edge
from penstock.blocks.tiers.tier_events import BlockHints, MoveEnded, TierName
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.blocks.tiers.tier_settings import LOAD_DEADLINE, PREFETCH_DEADLINE
from penstock.blocks.tiers.tier_state import LOWER_TIERS, Fetch
from penstock.kernel.machine import Nanos, nanos


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
                ids[self._queue(now, keys, batch, of, hints, job)] = None
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
            ids[self._queue(now, keys, batch, of, hints, job)] = None
        return list(ids)

    def _queue(
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
                        arrivals += self._dropped(id, fetch, reason)
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
            return self._dropped(id, fetch, reason)
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

    def _dropped(self, id: int, fetch: Fetch, reason: str) -> list[Arrival]:
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
