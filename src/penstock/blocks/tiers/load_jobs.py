"""`LoadJobs`: brings blocks into the engine's rows, as one unbroken prefix of what it wanted."""

from penstock.blocks.block_key import BlockKey
from penstock.blocks.block_manager import BlockColumns
from penstock.blocks.tiers.fetches import Arrival, Fetches, Source
from penstock.blocks.tiers.tier_events import BlocksWanted, JobEnded, MoveEnded, TierName
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.blocks.tiers.tier_settings import COPY_DEADLINE, LOAD_DEADLINE
from penstock.blocks.tiers.tier_state import LoadJob, LoadMove
from penstock.kernel.machine import Nanos, nanos


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
        self._close(event.job, job)
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
        self._close(arrival.job, job)

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
        self._close(move.job, job)

    def give_up(self, id: int, reason: str) -> None:
        """Make all of a job misses: it ends once nothing touches its rows."""
        job = self._moves.state.loads[id]
        self._end_at(id, job, 0, reason)
        for move in job.moves:
            self._moves.cancel(move)
        self._close(id, job)

    def due(self, now: Nanos, id: int) -> None:
        """Give up what a job still waits for, where its deadline has passed."""
        job = self._moves.state.loads.get(id)
        if job is not None and job.deadline <= now and job.fetches:
            self._end_at(id, job, min(self._fetches.first_waiting(fetch, id) for fetch in job.fetches), "late")
            self._close(id, job)

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

    def _close(self, id: int, job: LoadJob) -> None:
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
