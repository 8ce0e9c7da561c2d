"""`StoreJobs`: which offered blocks go into the host tier, and what came of them."""

from collections.abc import Sequence

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockColumns
from penstock.blocks.tiers.tier_events import BlocksOffered, JobEnded, MoveEnded
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.blocks.tiers.tier_settings import COPY_DEADLINE, ONCE_BLOCKS
from penstock.blocks.tiers.tier_state import StoreMove
from penstock.kernel.machine import Nanos, nanos


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
        positions, parents = self._chosen(event, done, here)
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

    def _chosen(
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
