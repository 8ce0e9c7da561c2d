"""What an engine wants of its tiers: answers to its queries, loads into its rows, and stores of what it offers."""

from collections.abc import Sequence

from penstock.kernel.machine import Nanos, nanos
from penstock.kernel.tiers.load_worth import BlockRun, LoadCosts, Way, worth_loading
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.block_manager import BlockColumns
from penstock_kv.blocks.tiers.lower_moves import Arrival, Fetches, Source
from penstock_kv.blocks.tiers.tier_events import (
    AskPeer,
    BlockHints,
    BlocksAsked,
    BlocksOffered,
    BlocksWanted,
    JobEnded,
    MoveEnded,
    PeerAnswered,
    PrefetchWanted,
    TierName,
)
from penstock_kv.blocks.tiers.tier_moves import TierMoves
from penstock_kv.blocks.tiers.tier_settings import (
    COPY_DEADLINE,
    LOAD_DEADLINE,
    ONCE_BLOCKS,
    PEER_DEADLINE,
    PEER_MEMORY,
    PEER_MEMORY_BLOCKS,
    PEER_QUERIES,
    PEERS_ASKED,
    REST,
)
from penstock_kv.blocks.tiers.tier_state import LOWER_TIERS, Edge, LoadJob, LoadMove, PeerBlock, PeerQuery, StoreMove


class LoadGate:
    """Compares loading with computing (`penstock.kernel.tiers.load_worth`), by what edges and the engine measured.

    Bytes that are under way on an edge go before a block's own. Copies into the engine overlap with fetches, so a load
    takes this long at most.
    """

    def __init__(self, moves: TierMoves, fetches: Fetches) -> None:
        self._moves = moves
        self._fetches = fetches
        self._copy = moves.edge("host", "engine")[1]
        self._below = next((moves.edge(tier, "host")[1] for tier in LOWER_TIERS if tier in moves.tiers), None)

    def worth(self, now: Nanos, keys: Sequence[BlockKey], hints: BlockHints) -> tuple[int, str]:
        """Return how many leading blocks to load, and why not more."""
        there, reason, runs = self.there(now, keys)
        if not there or (not self._compute and hints.deadline is None):
            return there, reason
        copy = self._way_over(now, "", self._copy)
        found = [
            BlockRun(count, (copy,) if edge is None else (copy, self._way_over(now, name, edge)))
            for name, edge, count in runs
        ]
        blocks, short = worth_loading(found, self._compute, hints.deadline)
        return blocks, reason if blocks == there else short

    def costs(self, now: Nanos) -> LoadCosts:
        """Return what a load costs while nothing else is under way."""
        copy = self._way_over(now, "", self._copy, idle=True)
        tokens = self._moves.settings.block_tokens
        fetch = Way("", 0.0, 0.0) if self._below is None else self._way_over(now, "", self._below, idle=True)
        return LoadCosts(
            compute=self._moves.state.seconds_per_token,
            host_start=copy.start,
            host_token=copy.block / tokens,
            disk_start=fetch.start,
            disk_token=fetch.block / tokens,
        )

    @property
    def _compute(self) -> float:
        """Seconds that the engine takes for a block; 0 until that is measured."""
        return self._moves.settings.block_tokens * self._moves.state.seconds_per_token

    def _way_over(self, now: Nanos, name: str, edge: Edge, *, idle: bool = False) -> Way:
        speed = edge.speed(now)
        before = 0.0 if idle else (edge.in_flight + edge.queued) / speed.rate
        return Way(name, speed.latency + before, self._moves.settings.block_bytes / speed.rate)

    def depth(self, now: Nanos, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks are there, at whatever cost."""
        return self.there(now, keys)[0] if self._moves.state.peers else 0

    def there(self, now: Nanos, keys: Sequence[BlockKey]) -> tuple[int, str, list[tuple[str, Edge | None, int]]]:
        """Return how many leading blocks are there, why not more, and the way of each run of them."""
        index, source_of, moves = self._moves.host.index, self._fetches.source, self._moves
        runs: list[tuple[str, Edge | None, int]] = []
        name: str | None = None
        edge: Edge | None = None
        start, reason = 0, ""
        depth = len(keys)
        for position, key in enumerate(keys):
            if key in index:
                way, its_edge = "", None
            else:
                source = source_of(now, key)
                if isinstance(source, str):
                    depth, reason = position, source
                    break
                way, its_edge = moves.edge(source.tier, "host", source.peer)
            if way != name:
                if name is not None:
                    runs.append((name, edge, position - start))
                name, edge, start = way, its_edge, position
        if name is not None:
            runs.append((name, edge, depth - start))
        return depth, reason, runs


class PeerFinder:
    """Asks the nearest peers at once; the one that has most leading blocks is remembered as their source.

    An answer is remembered for a short time, also that nobody has a block: engines ask again while a request waits.
    """

    def __init__(self, moves: TierMoves) -> None:
        self._moves = moves

    def ask(self, now: Nanos, event: BlocksAsked | PrefetchWanted, depth: int) -> bool:
        """Ask for the blocks from ``depth`` on; False where that is of no use: the event can be handled at once."""
        state = self._moves.state
        if not state.peers or depth == len(event.keys) or len(state.queries) >= PEER_QUERIES:
            return False
        keys = event.keys[depth:]
        known = state.peer_blocks.get(keys[0])
        if known is not None and known.until > now:
            return False
        peers = [peer for peer in state.peers if not self._moves.edge("peer", "host", peer)[1].rests(now)][:PEERS_ASKED]
        if not peers or not self._asking_pays(now, peers[0], len(keys)):
            return False
        query = PeerQuery(event=event, keys=keys, deadline=now + PEER_DEADLINE)
        query_id = self._moves.new_id()
        state.queries[query_id] = query
        for peer in peers:
            id = self._moves.new_id()
            query.asks[id] = peer
            state.peer_asks[id] = query_id
            self._moves.effects.append(AskPeer(id=id, peer=peer, keys=keys))
        self._moves.timer(query.deadline, "query", query_id)
        return True

    def answered(self, now: Nanos, event: PeerAnswered) -> PeerQuery | None:
        """Take an answer; returns the query where it was the last one, or has all."""
        state = self._moves.state
        query_id = state.peer_asks.pop(event.id, None)
        if query_id is None:
            state.counts.unknown += 1
            return None
        query = state.queries[query_id]
        peer = query.asks.pop(event.id)
        blocks = min(event.blocks, len(query.keys))
        if blocks > query.blocks:
            query.blocks, query.peer = blocks, peer
        return self._close_query(now, query_id, query) if not query.asks or query.blocks == len(query.keys) else None

    def late(self, now: Nanos, query_id: int) -> PeerQuery:
        """Close a query whose deadline has passed; peers that did not answer are left alone for a while."""
        query = self._moves.state.queries[query_id]
        for peer in query.asks.values():
            self._moves.edge("peer", "host", peer)[1].rest_until = now + REST
            self._moves.state.tiers["peer"].late += 1
        return self._close_query(now, query_id, query)

    def changed(self, peers: Sequence[str]) -> None:
        """Know these peers and no others."""
        state = self._moves.state
        state.peers = list(peers)
        for key in [key for key, block in state.peer_blocks.items() if block.peer and block.peer not in peers]:
            del state.peer_blocks[key]
        for name, edge in list(state.edges.items()):
            if edge.peer and edge.peer not in peers and not edge.in_flight and not edge.queue and not edge.ahead:
                del state.edges[name]

    def _asking_pays(self, now: Nanos, peer: str, blocks: int) -> bool:
        """Return whether asking could pay, if the peer had all."""
        settings, per_token = self._moves.settings, self._moves.state.seconds_per_token
        edge = self._moves.edge("peer", "host", peer)[1]
        computing = blocks * settings.block_tokens * per_token
        return not per_token or computing > edge.seconds(now, blocks * settings.block_bytes)

    def _close_query(self, now: Nanos, query_id: int, query: PeerQuery) -> PeerQuery:
        state = self._moves.state
        del state.queries[query_id]
        for id in query.asks:
            del state.peer_asks[id]
        until = now + PEER_MEMORY
        for key in query.keys[: query.blocks]:
            self._remember(key, PeerBlock(query.peer, until))
        if query.blocks < len(query.keys):
            self._remember(query.keys[query.blocks], PeerBlock("", until))
        return query

    def _remember(self, key: BlockKey, block: PeerBlock) -> None:
        memory = self._moves.state.peer_blocks
        memory.pop(key, None)
        memory[key] = block
        if len(memory) > PEER_MEMORY_BLOCKS:
            del memory[next(iter(memory))]


class LoadJobs:
    """Host to engine. Blocks in the host tier are copied at once, others when their fetch ends.

    A block that can't be had makes it and all behind it misses. A job ends once nothing of it is under way.
    """

    def __init__(self, moves: TierMoves, fetches: Fetches) -> None:
        self._moves = moves
        self._fetches = fetches
        self._edge_name, self._edge = moves.edge("host", "engine")

    def begin(self, now: Nanos, event: BlocksWanted) -> list[BlockKey]:
        """Start a job; returns those of its blocks that the host tier has."""
        moves, index = self._moves, self._moves.host.index
        keys, hints = event.keys, event.hints
        count = len(keys)
        wait = LOAD_DEADLINE if hints.deadline is None else nanos(hints.deadline)
        job = LoadJob(keys=keys, rows=event.rows, done=[False] * count, end=count, deadline=now + wait, hints=hints)
        moves.state.loads[event.job] = job
        here: list[int] = []
        wanted: list[tuple[int, Source]] = []
        for position, key in enumerate(keys):
            if key in index:
                here.append(position)
                continue
            source = self._fetches.source(now, key)
            if isinstance(source, str):
                self._end_at(event.job, job, position, source)
                break
            wanted.append((position, source))
        if here:
            self._copy(now, event.job, job, here, "host")
        if wanted:
            job.fetches = self._fetches.want(now, keys, wanted, hints, event.job)
            moves.timer(job.deadline, "load", event.job)
        self._close_job(event.job, job)
        return [keys[position] for position in here]

    def arrived(self, now: Nanos, arrival: Arrival) -> None:
        """Copy what a fetch brought, and give up what is behind anything that it did not bring."""
        job = self._moves.state.loads.get(arrival.job)
        if job is None or arrival.fetch not in job.fetches:  # given up by what another fetch did not bring
            return
        job.fetches.remove(arrival.fetch)
        if arrival.missing:
            self._end_at(arrival.job, job, min(arrival.missing), arrival.reason)
        positions = [position for position in arrival.arrived if position < job.end]
        if positions:
            self._copy(now, arrival.job, job, positions, arrival.origin)
        self._close_job(arrival.job, job)

    def ended(self, id: int, move: LoadMove, event: MoveEnded) -> None:
        """Take note of blocks that are in the engine's rows."""
        moves = self._moves
        job = moves.state.loads[move.job]
        job.moves.remove(id)
        moves.host.invalidate(move.handle, event.corrupt, move.blocks)
        moves.host.release(move.handle)
        for position, done in zip(move.positions, event.done, strict=True):
            if done:
                job.done[position] = True
            else:
                self._end_at(move.job, job, position, "corrupt" if event.corrupt else "failed")
                break
        moves.state.tiers[move.origin].hits += sum(event.done)
        self._close_job(move.job, job)

    def give_up(self, id: int, reason: str) -> None:
        """Make all of a job misses: it ends once nothing touches its rows."""
        job = self._moves.state.loads[id]
        self._end_at(id, job, 0, reason)
        for move in job.moves:
            self._moves.cancel(move)
        self._close_job(id, job)

    def due(self, now: Nanos, id: int) -> None:
        """Give up what a job still waits for, where its deadline has passed."""
        job = self._moves.state.loads.get(id)
        if job is not None and job.deadline <= now and job.fetches:
            self._end_at(id, job, min(self._fetches.first_waiting(fetch, id) for fetch in job.fetches), "late")
            self._close_job(id, job)

    def _copy(self, now: Nanos, id: int, job: LoadJob, positions: list[int], origin: TierName) -> None:
        moves, host, rows = self._moves, self._moves.host, job.rows
        keys = [job.keys[position] for position in positions]
        host.mark(keys, job.hints, now)
        handle = host.hold(keys, now)
        move_id = moves.new_id()
        move = LoadMove(
            edge=self._edge_name,
            job=id,
            positions=positions,
            blocks=BlockColumns(keys=keys),
            handle=handle,
            origin=origin,
        )
        job.moves.append(move_id)
        deadline = min(job.deadline, now + COPY_DEADLINE)
        moves.post(move_id, move, deadline, [rows[position] for position in positions])

    def _end_at(self, id: int, job: LoadJob, position: int, reason: str) -> None:
        """Make a block and all behind it misses."""
        if position < job.end:
            job.end, job.reason = position, reason
            job.fetches = [fetch for fetch in job.fetches if self._fetches.leave(fetch, id, position)]

    def _close_job(self, id: int, job: LoadJob) -> None:
        """End a job of which nothing is under way."""
        if job.moves or job.fetches or id not in self._moves.state.loads:
            return
        del self._moves.state.loads[id]
        counts, count = self._moves.state.counts, len(job.keys)
        end = job.end
        if False in job.done[:end]:
            end = job.done.index(False)
        counts.loaded += end
        if end < count:
            counts.miss(job.reason, count - end)
        self._moves.effects.append(JobEnded(job=id, done=[True] * end + [False] * (count - end)))


class StoreJobs:
    """Engine to host. A job never waits: what can't be taken at once is skipped and counted."""

    def __init__(self, moves: TierMoves) -> None:
        self._moves = moves
        self._edge_name, self._edge = moves.edge("engine", "host")
        self._once_limit = min(ONCE_BLOCKS, 4 * sum(tier.manager.table.slots for tier in moves.tiers.values()))

    def begin(self, now: Nanos, event: BlocksOffered) -> list[BlockKey]:
        """Post the move of a job, or end it; returns those of its blocks that the host tier has already."""
        moves, host, counts = self._moves, self._moves.host, self._moves.host.counts
        keys = event.keys
        done = [False] * len(keys)
        here: list[BlockKey] = []
        positions, parents = self._choose_blocks(event, done, here)
        if here:
            host.touch(here, now, event.hints)
        settings = moves.settings
        wanted = len(positions)
        allowed = (settings.store_bytes - self._edge.in_flight) // settings.block_bytes
        counts.skip("busy", wanted - min(wanted, max(0, allowed)))
        wanted = min(wanted, max(0, allowed))
        room = min(wanted, moves.room(now)) if wanted else 0
        counts.skip("full", wanted - room)
        if not room:
            moves.effects.append(JobEnded(job=event.job, done=done))
            return here
        del positions[room:]
        hints = event.hints
        blocks = BlockColumns(
            keys=[keys[position] for position in positions],
            parents=parents[:room],
            priorities=[hints.priority] * room,
            pins=[now + nanos(hints.pin) if hints.pin else 0] * room,
        )
        handle = host.take(room, now)
        id = moves.new_id()
        moves.state.stores[event.job] = id
        moves.state.incoming.update(dict.fromkeys(blocks.keys, id))
        move = StoreMove(
            edge=self._edge_name, job=event.job, positions=positions, blocks=blocks, done=done, handle=handle
        )
        moves.post(id, move, now + COPY_DEADLINE, [event.rows[position] for position in positions])
        return here

    def ended(self, id: int, move: StoreMove, event: MoveEnded) -> list[BlockKey]:
        """Register what arrived and end the job; returns the keys that are new."""
        moves, host = self._moves, self._moves.host
        moves.arrived(id, move.blocks.keys)
        del moves.state.stores[move.job]
        fresh: list[BlockKey] = []
        if move.void:
            host.release(move.handle)
            move.done = [False] * len(move.done)
        else:
            fresh = host.register(move.handle, move.blocks, event.done)
            for position, done in zip(move.positions, event.done, strict=True):
                move.done[position] = bool(done)
        moves.effects.append(JobEnded(job=move.job, done=move.done))
        return fresh

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Take note of blocks that the engine used from its own cache, for policy ``second_hit``."""
        if self._moves.settings.offload == "second_hit":
            for key in keys:
                self._remember(key)

    def _choose_blocks(
        self, event: BlocksOffered, done: list[bool], here: list[BlockKey]
    ) -> tuple[list[int], list[BlockKey | None]]:
        """Choose blocks by the policy: their positions and parents; ``done`` and ``here`` get those that are here."""
        moves, settings = self._moves, self._moves.settings
        index, incoming, counts = moves.host.index, moves.state.incoming, moves.host.counts
        positions: list[int] = []
        parents: list[BlockKey | None] = []
        keys, parent = event.keys, event.parent
        no_holes = settings.min_priority > 0
        if no_holes and event.hints.priority < settings.min_priority:
            counts.skip("priority", len(keys))
            return [], []
        if no_holes and parent is not None and not moves.has(parent):
            counts.skip("hole", len(keys))
            return [], []
        takes_all = settings.offload == "all"
        for position, key in enumerate(keys):
            if key in index:
                done[position] = True
                here.append(key)
            elif key in incoming:
                pass
            elif takes_all or not (reason := self._refusal(key)):
                positions.append(position)
                parents.append(parent)
            else:
                done[position] = reason == "present"
                counts.skip(reason, 1)
                if no_holes and not done[position]:
                    counts.skip("hole", len(keys) - position - 1)
                    break
            parent = key
        return positions, parents

    def _refusal(self, key: BlockKey) -> str:
        """Return why a block is not taken that the host tier lacks; empty where it is."""
        moves = self._moves
        if any(key in tier.index for tier in moves.tiers.values()):
            return "present"
        if moves.settings.offload == "second_hit" and key not in moves.state.once:
            self._remember(key)
            return "first use"
        moves.state.once.pop(key, None)
        return ""

    def _remember(self, key: BlockKey) -> None:
        once = self._moves.state.once
        once[key] = None
        if len(once) > self._once_limit:
            del once[next(iter(once))]
