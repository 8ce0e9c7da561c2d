"""`LowerWrites`: what goes from the host tier to those below, and when: at once, at second use, or before eviction."""

from collections.abc import Sequence
from itertools import islice

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockColumns
from penstock.blocks.tiers.block_tier import BlockTier
from penstock.blocks.tiers.edge import Edge
from penstock.blocks.tiers.tier_events import MoveEnded
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.blocks.tiers.tier_settings import WRITE_DEADLINE
from penstock.blocks.tiers.tier_state import LOWER_TIERS, LowerQueue, LowerTier, WriteMove
from penstock.kernel.machine import Nanos


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
            target = self._target(now)
            if target is None:  # rather lose old blocks than refuse new ones for as long as a device hangs
                handle, _ = host.vacate(count, _nothing, now)
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

    def _target(self, now: Nanos) -> tuple[LowerTier, BlockTier, str, Edge] | None:
        for target in self._targets:
            if not target[3].rests(now) and target[1].manager.available(now):
                return target
        return None

    def _dirty(self, key: BlockKey) -> bool:
        """Return whether a block is in no lower tier."""
        return not any(key in tier.index for _, tier, _, _ in self._targets)


def _nothing(key: BlockKey) -> bool:
    return False
