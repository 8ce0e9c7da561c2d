"""`TierMachine`: the tiers below one engine's KV memory: what is offloaded, loaded, evicted and announced, and when.

It moves no bytes. Whoever drives it carries out every `Move` and answers with `MoveEnded`; a block counts as arrived
only where that says so.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Wake, Woken, check_version
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock_kv.blocks.tiers import tier_events as events
from penstock_kv.blocks.tiers.lower_moves import Arrival, Fetches, LowerWrites, Source
from penstock_kv.blocks.tiers.tier_jobs import LoadGate, LoadJobs, PeerFinder, StoreJobs
from penstock_kv.blocks.tiers.tier_moves import BlockTier, TierMoves
from penstock_kv.blocks.tiers.tier_settings import AHEAD_FETCHES, TierSettings
from penstock_kv.blocks.tiers.tier_state import (
    Fetch,
    LoadMove,
    PeerQuery,
    StoreMove,
    TierCounts,
    TierState,
    WriteMove,
)

VERSION = 1


class TierMachine:
    """The tiers of one engine. `penstock_kv.blocks.tiers.tier_events` is its vocabulary."""

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self._handlers: dict[type[Event], Callable[[Nanos, Any], None]] = {
            events.BlocksAsked: self._query,
            events.BlocksOffered: self._offered,
            events.BlocksWanted: self._wanted,
            events.JobCancelled: self._cancelled,
            events.BlocksUsed: self._used,
            events.PrefetchWanted: self._prefetch,
            events.EngineSpeed: self._speed,
            events.BlocksPinned: self._pinned,
            events.TierCleared: self._cleared,
            events.TierFound: self._adopted,
            events.MoveEnded: self._move_ended,
            events.EdgeMeasured: self._measured,
            events.PeerAnswered: self._peer_answered,
            events.PeersChanged: self._peers_changed,
            Woken: self._woken,
        }
        self._assemble(TierState(), {})

    def _assemble(self, state: TierState, blocks: Snapshot) -> None:
        """Put the machine together. ``blocks``: snapshots of its managers, restored first: parts refer to indices."""
        settings = self.settings
        self.state = state
        self._effects: list[Effect] = []
        self.tiers: dict[events.TierName, BlockTier] = {}
        sizes: list[tuple[events.TierName, int]] = [
            ("host", settings.host_blocks),
            ("disk", settings.disk_blocks),
            ("object", settings.object_blocks),
        ]
        for name, size in sizes:
            counts = state.tiers.setdefault(name, TierCounts())
            if size:
                self.tiers[name] = tier = BlockTier(name, size, settings, counts, self._effects)
                if name in blocks:
                    tier.restore(blocks[name])
        state.tiers.setdefault("peer", TierCounts())
        self._moves = TierMoves(settings, state, self.tiers, self._effects)
        self._fetches = Fetches(self._moves)
        self._gate = LoadGate(self._moves, self._fetches)
        self._stores = StoreJobs(self._moves)
        self._loads = LoadJobs(self._moves, self._fetches)
        self._writes = LowerWrites(self._moves)
        self._peers = PeerFinder(self._moves)
        self._open: dict[str, Container[int]] = {"load": state.loads, "move": state.moves, "query": state.queries}

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Take one event.

        Raises:
            KeyError: an event of a type that is none of the machine's.
        """
        self._handlers[type(event)](now, event)
        self._writes.pump(now)
        while arrivals := self._fetches.pump(now):
            self._deliver(now, arrivals)
        self._wake()
        effects = self._effects[:]
        self._effects.clear()
        if self.state.ahead:
            self._count_wasted(effects)
        return effects

    def _count_wasted(self, effects: Sequence[Effect]) -> None:
        """Count blocks that were prefetched, and have left host memory before anybody loaded them."""
        for effect in effects:
            if isinstance(effect, events.BlocksRemoved) and effect.tier == "host":
                for key in effect.keys:
                    if key in self.state.ahead:
                        del self.state.ahead[key]
                        self.state.counts.prefetch_wasted += 1

    # --- what an engine wants -----------------------------------------------------------------------------------------

    def _query(self, now: Nanos, event: events.BlocksAsked) -> None:
        if not self._peers.ask(now, event, self._gate.depth(now, event.keys)):
            self._answer(now, event)

    def _answer(self, now: Nanos, event: events.BlocksAsked) -> None:
        blocks, reason = self._gate.worth(now, event.keys, event.hints)
        counts = self.state.counts
        counts.queried += len(event.keys)
        counts.answered += blocks
        if blocks < len(event.keys):
            counts.refuse(reason, len(event.keys) - blocks)
        self._effects.append(events.BlocksAnswered(query=event.query, blocks=blocks, reason=reason))

    def _offered(self, now: Nanos, event: events.BlocksOffered) -> None:
        if event.job in self.state.stores or event.job in self.state.loads:
            self.state.counts.unknown += 1
            return
        self._writes.used(self._stores.begin(now, event))

    def _wanted(self, now: Nanos, event: events.BlocksWanted) -> None:
        if event.job in self.state.stores or event.job in self.state.loads:
            self.state.counts.unknown += 1
            return
        if self.state.ahead:
            for key in event.keys:
                if key in self.state.ahead:
                    del self.state.ahead[key]
                    self.state.counts.prefetch_hits += 1
        here = self._loads.begin(now, event)
        for tier in self.tiers.values():
            if tier.name != "host":
                tier.touch(here, now, event.hints)
        self._writes.used(here)

    def _cancelled(self, now: Nanos, event: events.JobCancelled) -> None:
        if event.job in self.state.loads:
            self._loads.give_up(event.job, "cancelled")
        elif event.job in self.state.stores:
            self._moves.cancel(self.state.stores[event.job])
        else:  # it has ended, and its `JobEnded` met the cancellation on the way
            self.state.counts.unknown += 1

    def _used(self, now: Nanos, event: events.BlocksUsed) -> None:
        self._stores.used(event.keys)
        for tier in self.tiers.values():
            here = tier.touch(event.keys, now, events.BlockHints())
            if tier.name == "host":
                self._writes.used(here)

    def _prefetch(self, now: Nanos, event: events.PrefetchWanted) -> None:
        if not self._peers.ask(now, event, self._gate.depth(now, event.keys)):
            self._fetch_ahead(now, event)

    def _fetch_ahead(self, now: Nanos, event: events.PrefetchWanted) -> None:
        host = self.tiers["host"]
        wanted: list[tuple[int, Source]] = []
        for position, key in enumerate(event.keys):
            if key in host.index:
                continue
            source = self._fetches.source(now, key)
            if isinstance(source, str):
                break
            wanted.append((position, source))
        host.touch(event.keys, now, event.hints)
        queued = sum(len(edge.ahead) for edge in self.state.edges.values())
        room = max(0, AHEAD_FETCHES - queued) * self.settings.move_blocks
        host.counts.skip("busy", len(wanted) - min(room, len(wanted)))
        self._fetches.want(now, event.keys, wanted[:room], event.hints, None)

    def _speed(self, now: Nanos, event: events.EngineSpeed) -> None:
        self.state.seconds_per_token = event.seconds_per_token

    # --- what an operator wants ---------------------------------------------------------------------------------------

    def _pinned(self, now: Nanos, event: events.BlocksPinned) -> None:
        for tier in self.tiers.values():
            if tier.ranked:
                tier.manager.pin(event.keys, event.until)
            else:
                tier.counts.hints_ignored += len(tier.manager.scan(event.keys))

    def _cleared(self, now: Nanos, event: events.TierCleared) -> None:
        """Drop what tiers have. What is under way into one of them ends as nothing.

        Where all are cleared, the engine's KV itself may have changed its meaning: jobs under way end with nothing.
        """
        state, every = self.state, event.tier is None
        for name, tier in self.tiers.items():
            if every or name == event.tier:
                tier.clear()
        for name, queue in state.lower.items():
            if every or name == event.tier:
                queue.waiting.clear()
        if every:
            state.once.clear()
            for job in list(state.loads):
                self._loads.give_up(job, "cleared")
        if every or event.tier == "peer":
            state.peer_blocks.clear()
        arrivals: list[Arrival] = []
        for id, move in list(state.moves.items()):
            edge = state.edges[move.edge]
            into = every or edge.target == event.tier
            if isinstance(move, Fetch):
                if into or (edge.source == event.tier and not move.handle):
                    arrivals += self._fetches.void(id, move, "cleared")
            elif into and isinstance(move, StoreMove | WriteMove):
                move.void = True
                self._moves.arrived(id, move.blocks.keys)
        self._deliver(now, arrivals)

    # --- what a carrier answers ---------------------------------------------------------------------------------------

    def _adopted(self, now: Nanos, event: events.TierFound) -> None:
        self.tiers[event.tier].adopt(event)

    def _measured(self, now: Nanos, event: events.EdgeMeasured) -> None:
        self._moves.edge(event.source, event.target, event.peer)[1].measured(now, event.size, event.seconds)

    def _move_ended(self, now: Nanos, event: events.MoveEnded) -> None:
        move = self._moves.ended(now, event)
        match move:
            case StoreMove():
                self._writes.stored(self._stores.ended(event.id, move, event))
            case LoadMove():
                self._loads.ended(event.id, move, event)
            case WriteMove():
                self._writes.ended(event.id, move, event)
            case Fetch():
                fresh, arrivals = self._fetches.ended(event.id, move, event)
                self._deliver(now, arrivals)
                self._writes.stored(fresh)

    def _peer_answered(self, now: Nanos, event: events.PeerAnswered) -> None:
        query = self._peers.answered(now, event)
        if query is not None:
            self._resume(now, query)

    def _peers_changed(self, now: Nanos, event: events.PeersChanged) -> None:
        self._peers.changed(event.peers)

    def _resume(self, now: Nanos, query: PeerQuery) -> None:
        """Handle what waited for peers."""
        match query.event:
            case events.BlocksAsked() as event:
                self._answer(now, event)
            case events.PrefetchWanted() as event:
                self._fetch_ahead(now, event)

    def _woken(self, now: Nanos, event: Woken) -> None:
        state = self.state
        state.wake_at = None
        while state.timers and state.timers[0][0] <= now:
            _, what, id = heapq.heappop(state.timers)
            if what == "load":
                self._loads.due(now, id)
                continue
            if what == "query":
                if id in state.queries:
                    self._resume(now, self._peers.late(now, id))
                continue
            match state.moves.get(id):
                case Fetch() as fetch:
                    self._deliver(now, self._fetches.late(now, id, fetch))
                case WriteMove() as write:
                    self._moves.late(now, write)

    def _deliver(self, now: Nanos, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self._loads.arrived(now, arrival)

    def _wake(self) -> None:
        """Ask to be woken for the earliest deadline that still matters."""
        state, timers = self.state, self.state.timers
        while timers and timers[0][2] not in self._open[timers[0][1]]:
            heapq.heappop(timers)
        if timers and timers[0][0] != state.wake_at:
            state.wake_at = timers[0][0]
            self._effects.append(Wake(at=state.wake_at))

    def costs(self, now: Nanos) -> LoadCosts:
        """Return what loading blocks costs now, and computing them."""
        return self._gate.costs(now)

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data."""
        tiers = {name: tier.manager.snapshot() for name, tier in self.tiers.items()}
        return {"version": VERSION, "state": msgspec.to_builtins(self.state), "tiers": tiers}

    def restore(self, snapshot: Snapshot) -> None:
        """Become the machine that wrote ``snapshot``, of the same settings.

        Raises:
            ValueError: it is of another version.
        """
        check_version(snapshot, VERSION, "the tier machine")
        self._assemble(msgspec.convert(snapshot["state"], TierState), snapshot["tiers"])

    def check(self) -> None:
        """Compare with a recount. Cost: walks all blocks, moves and jobs.

        Raises:
            InvariantError: a handle is lost or open twice, or bytes, queues, jobs or deadlines contradict the moves.
        """
        state, block_bytes = self.state, self.settings.block_bytes
        handles: Counter[tuple[str, int]] = Counter()
        in_flight: Counter[str] = Counter()
        owned = {id for load in state.loads.values() for id in load.moves} | set(state.stores.values())
        queued = Counter(id for edge in state.edges.values() for id in edge.queue + edge.ahead)
        for id, move in state.moves.items():
            if move.handle:
                handles[move.target if isinstance(move, WriteMove) else "host", move.handle] += 1
                in_flight[move.edge] += len(move.blocks.keys) * block_bytes
            if isinstance(move, WriteMove):
                handles["host", move.host_handle] += 1
            elif isinstance(move, Fetch):
                if move.source_handle:
                    handles[move.source, move.source_handle] += 1
                if queued[id] != (not move.handle) or any(id not in state.loads[job].fetches for job in move.waiters):
                    raise InvariantError(f"fetch {id} is queued {queued[id]} times, or its jobs do not know of it")
            elif id not in owned:
                raise InvariantError(f"move {id} is of job {move.job}, which has no such move")
        for name, edge in state.edges.items():
            if edge.in_flight != in_flight[name]:
                raise InvariantError(f"{name}: {edge.in_flight} bytes in flight, {in_flight[name]} counted")
            waiting = sum(len(state.moves[id].blocks.keys) for id in edge.queue) * block_bytes
            if edge.queued != waiting:
                raise InvariantError(f"{name}: {edge.queued} bytes queued, {waiting} counted")
        for tier in self.tiers.values():
            tier.manager.check()
            expected = {handle for name, handle in handles if name == tier.name}
            if tier.handles != expected or any(count > 1 for count in handles.values()):
                raise InvariantError(f"{tier.name}: handles {tier.handles} are open, moves have {expected}")
        for id, load in state.loads.items():
            if not load.moves and not load.fetches:
                raise InvariantError(f"load job {id} has nothing under way and has not ended")
            if load.fetches and not any(what == "load" and job == id for _, what, job in state.timers):
                raise InvariantError(f"load job {id} waits without a deadline")
        asks = {id: query_id for query_id, query in state.queries.items() for id in query.asks}
        if asks != state.peer_asks or not all(query.asks for query in state.queries.values()):
            raise InvariantError("questions to peers and the queries that wait for them differ")
        if any(move not in state.moves for move in state.incoming.values()):
            raise InvariantError("a block is on its way by a move that is none")
        if state.timers and (state.wake_at is None or state.wake_at > state.timers[0][0]):
            raise InvariantError("nobody wakes the machine for its next deadline")
