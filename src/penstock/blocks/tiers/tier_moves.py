"""`TierMoves`: posts moves and takes their ends: ids, bytes in flight, deadlines, measured speeds and rests."""

import heapq
from collections.abc import Sequence

from penstock.blocks.block_key import BlockKey
from penstock.blocks.tiers.block_tier import BlockTier
from penstock.blocks.tiers.edge import Edge
from penstock.blocks.tiers.tier_events import CancelMove, Move, MoveEnded, Place, TierName
from penstock.blocks.tiers.tier_settings import REST, TierSettings
from penstock.blocks.tiers.tier_state import Fetch, LoadMove, OpenMove, StoreMove, TierState, WriteMove
from penstock.kernel.machine import Effect, Nanos


class TierMoves:
    """What all kinds of moves share, and the tiers between which they go.

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
        sources, targets, generations = self._slots(move, rows)
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

    def _slots(self, move: OpenMove, rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int], list[int]]:
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
