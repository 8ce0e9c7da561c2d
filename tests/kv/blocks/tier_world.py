"""Carriers, an engine and a listener around a tier machine: naive, with real bytes and every fault, and they check it.

What a slot has is a key and an epoch (how often all was cleared before it was computed). A carrier checks as a real one
does, but a wrong block that nobody damaged on purpose fails the test: the machine asked for a slot that has another.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.kernel.machine import MILLISECOND, Effect, Event, Nanos, Wake, Woken
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.tiers import tier_events as events
from penstock_kv.blocks.tiers.tier_machine import TierMachine
from penstock_kv.blocks.tiers.tier_settings import TierSettings
from tests.kv.blocks.naive_blocks import key_of

CHAINS = [
    [key_of(40, trunk, i) if i < 8 else key_of(41, trunk, branch, i) for i in range(20)]
    for trunk in range(4)
    for branch in range(3)
]
PARENTS = {key: parent for chain in CHAINS for parent, key in zip([None, *chain], chain, strict=False)}
LOWER = ("disk", "object")
PEERS = ("near", "far")
Slot = tuple[str, int]
"""Place and number."""


class Content(NamedTuple):
    """A block's bytes: of which block, and of which epoch."""

    key: BlockKey
    epoch: int


@dataclass
class Record:
    """What a lower tier's slot has on its medium."""

    key: BlockKey
    generation: int


@dataclass
class Job:
    """What an engine waits for."""

    keys: Sequence[BlockKey]
    rows: Sequence[int]
    load: bool


@dataclass
class World:
    """A machine and all around it. ``rng`` decides what fails."""

    settings: TierSettings
    rng: random.Random
    faults: float = 0.0
    now: Nanos = 0
    epoch: int = 0
    posted: dict[int, int] = field(default_factory=dict)
    contents: dict[Slot, Content | None] = field(default_factory=dict)
    records: dict[Slot, Record] = field(default_factory=dict)
    damaged: set[Slot] = field(default_factory=set)
    open_moves: dict[int, events.Move] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    asks: dict[int, events.AskPeer] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    ended: dict[int, Sequence[bool]] = field(default_factory=dict)
    queries: dict[int, Sequence[BlockKey]] = field(default_factory=dict)
    answers: dict[int, events.BlocksAnswered] = field(default_factory=dict)
    announced: dict[str, set[BlockKey]] = field(default_factory=dict)
    free_rows: list[int] = field(default_factory=lambda: list(range(200)))
    wake_at: Nanos | None = None
    next_id: int = 1
    hits: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    log: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = TierMachine(self.settings)

    # --- what happens

    def post(self, event: Event) -> list[Effect]:
        effects = list(self.machine.handle(self.now, event))
        self.log += effects
        for effect in effects:
            self._carry(effect)
        return effects

    def ask(self, keys: Sequence[BlockKey], **hints: float) -> int:
        id = self._id()
        self.queries[id] = keys
        self.post(events.BlocksAsked(query=id, keys=keys, hints=events.BlockHints(**hints)))  # type: ignore[arg-type]
        return id

    def store(self, chain: int, first: int, count: int, **hints: float) -> int:
        keys = CHAINS[chain][first : first + count]
        rows = self._rows(len(keys))
        for row, key in zip(rows, keys, strict=True):
            self.contents["engine", row] = Content(key, self.epoch)
        return self._job(events.BlocksOffered, keys, rows, hints, parent=PARENTS[keys[0]])

    def load(self, keys: Sequence[BlockKey], **hints: float) -> int:
        rows = self._rows(len(keys))
        for row in rows:
            self.contents["engine", row] = None
        return self._job(events.BlocksWanted, keys[: len(rows)], rows, hints)

    def cancel(self, id: int) -> None:
        self.post(events.JobCancelled(job=id))

    def pass_time(self, duration: Nanos) -> None:
        """Let time pass, and wake the machine when it asked for that."""
        until = self.now + duration
        while self.wake_at is not None and self.wake_at <= until:
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.post(Woken())
        self.now = until

    def end_move(
        self, id: int | None = None, fail: Callable[[int], bool] | None = None, seconds: float = 0.001
    ) -> None:
        """End a move, the oldest where no other is named; ``fail`` says which positions do."""
        id = min(self.open_moves) if id is None else id
        move = self.open_moves.pop(id)
        done, corrupt = [], []
        for position, key in enumerate(move.keys):
            source, target = (move.source, move.source_slots[position]), (move.target, move.target_slots[position])
            generation = move.generations[position]
            if move.source == "peer":
                right = not self.faults or self.rng.random() < 0.9  # else the peer has evicted it
            elif move.source in LOWER:
                record = self.records.get(source)
                right = record is not None and record.key == key and record.generation == generation
                assert right or source in self.damaged, f"{source} was to have {key!r}, and has {record}"
            else:
                content = self.contents.get(source)
                right = content is not None and content.key == key
                assert right or source in self.damaged, f"{source} was to have {key!r}"
            if source in self.damaged:
                right = False
            failed = fail(position) if fail else False
            if not right:
                corrupt.append(position)
            done.append(right and not failed)
            if move.source == "peer":
                self.contents[source] = Content(key, self.posted[id])
            self.contents[target] = self.contents[source] if done[-1] else None
            if done[-1]:
                self.damaged.discard(target)
            if move.target in LOWER and (done[-1] or self.rng.random() < 0.5) and right:
                self.contents[target] = self.contents[source]
                self.records[target] = Record(key, generation)
                self.damaged.discard(target)
        self.post(events.MoveEnded(id=id, done=done, corrupt=corrupt, seconds=seconds))

    def end_all(self) -> None:
        """Let everything come to its end, without faults."""
        for _ in range(10_000):
            if self.asks:
                self.answer_peer(min(self.asks), 0)
            elif self.open_moves:
                self.end_move()
            elif self.jobs or self.queries:
                assert self.wake_at is not None, "a job waits for nothing"
                self.pass_time(self.wake_at - self.now)
            else:
                return
        raise AssertionError("it never ends")

    def answer_peer(self, id: int, blocks: int) -> None:
        ask = self.asks.pop(id)
        self.post(events.PeerAnswered(id=id, blocks=min(blocks, len(ask.keys))))

    def clear(self, tier: events.TierName | None) -> None:
        self.epoch += tier is None
        self.post(events.TierCleared(tier=tier))

    def damage(self) -> None:
        """Flip a bit of some block of the host or a lower tier that no move touches."""
        busy = {slot for move in self.open_moves.values() for slot in slots_of(move)}
        slots = sorted(
            (name, slot)
            for name, tier in self.machine.tiers.items()
            for slot in tier.index.values()
            if (name, slot) not in busy
        )
        if slots:
            self.damaged.add(self.rng.choice(slots))

    def restart(self) -> None:
        """Go on with another machine that is restored from a snapshot."""
        snapshot = self.machine.snapshot()
        self.machine = TierMachine(self.settings)
        self.machine.restore(snapshot)
        assert self.machine.snapshot() == snapshot

    def crash(self) -> None:
        """Kill the process: what is in memory is lost, and a new machine is told what the media have."""
        self.tally()
        for job in self.jobs.values():
            self.free_rows += job.rows
        self.open_moves, self.jobs, self.queries, self.asks, self.announced = {}, {}, {}, {}, {}
        self.cancelled = set()
        self.damaged = {slot for slot in self.damaged if slot[0] in LOWER}
        self.machine, self.wake_at = TierMachine(self.settings), None
        for name in LOWER:
            if name in self.machine.tiers:
                rows = [(slot, record) for (place, slot), record in self.records.items() if place == name]
                self.post(
                    events.TierFound(
                        tier=name,  # type: ignore[arg-type]
                        keys=[record.key for _, record in rows],
                        slots=[slot for slot, _ in rows],
                        generations=[record.generation for _, record in rows],
                        parents=[PARENTS[record.key] for _, record in rows],
                    )
                )

    def tally(self) -> None:
        """Add the machine's counters to ours."""
        state = self.machine.state
        self.missed.update(state.counts.missed)
        for name, counts in state.tiers.items():
            self.hits[name] += counts.hits
            self.skipped.update(counts.skipped)

    # --- what the machine wants

    def _carry(self, effect: Effect) -> None:
        match effect:
            case events.Move():
                self._check_posted(effect)
                self.open_moves[effect.id] = effect
                self.posted[effect.id] = self.epoch
            case events.CancelMove():
                assert effect.id in self.open_moves, "a move that is over is cancelled"
                assert effect.id not in self.cancelled, "a move is cancelled twice"
                self.cancelled.add(effect.id)
            case events.AskPeer():
                self.asks[effect.id] = effect
            case events.BlocksAnswered():
                keys = self.queries.pop(effect.query)
                assert 0 <= effect.blocks <= len(keys)
                assert bool(effect.reason) == (effect.blocks < len(keys)), "a reason, where there is one to give"
                self.answers[effect.query] = effect
            case events.JobEnded():
                self._check_ended(effect)
            case events.BlocksStored():
                tier = self.announced.setdefault(effect.tier, set())
                for key, parent in zip(effect.keys, [effect.parent, *effect.keys], strict=False):
                    assert key not in tier, "stored twice"
                    assert parent == PARENTS[key] or (parent is None), "chained"
                    tier.add(key)
            case events.BlocksRemoved():
                for key in effect.keys:
                    self.announced[effect.tier].remove(key)
            case events.ForgetRecords():
                for slot, key in zip(effect.slots, effect.keys, strict=True):
                    record = self.records.get((effect.tier, slot))
                    if record is not None and record.key == key:
                        del self.records[effect.tier, slot]
                        if any((effect.tier, slot) in slots_of(move) for move in self.open_moves.values()):
                            self.damaged.add((effect.tier, slot))  # a clear met a read, which is a miss then
            case Wake():
                self.wake_at = effect.at
            case _:
                raise AssertionError(effect)

    def _check_posted(self, move: events.Move) -> None:
        """Nothing is written that anybody else reads or writes, and nothing read that somebody writes."""
        assert move.id not in self.open_moves
        assert len(move.keys) == len(move.source_slots) == len(move.target_slots) == len(move.generations) > 0
        assert move.deadline >= self.now
        read = {slot for other in self.open_moves.values() for slot in slots_of(other)[: len(other.keys)]}
        written = {slot for other in self.open_moves.values() for slot in slots_of(other)[len(other.keys) :]}
        slots = slots_of(move)
        sources, targets = slots[: len(move.keys)], slots[len(move.keys) :]
        assert len(set(targets)) == len(targets)
        assert not written & set(slots), "a slot is used that is being written"
        assert not read & set(targets), "a slot is written that is being read"
        if move.target != "engine":
            assert not set(targets) & {
                (move.target, slot)
                for slot in self.machine.tiers[move.target].index.values()  # type: ignore[index]
            }, "a registered block is overwritten"
        edge = [other for other in self.open_moves.values() if way(other) == way(move)]
        size = sum(len(other.keys) for other in [*edge, move]) * self.settings.block_bytes
        limit = self.settings.store_bytes if move.source == "engine" else self.settings.bytes_in_flight
        assert move.target == "engine" or size <= limit or not edge, "too many bytes in flight"
        assert sources or targets

    def _check_ended(self, effect: events.JobEnded) -> None:
        job = self.jobs.pop(effect.job)
        assert effect.job not in self.ended, "a job ends twice"
        assert len(effect.done) == len(job.keys)
        rows = {("engine", row) for row in job.rows}
        for move in self.open_moves.values():
            assert not rows & set(slots_of(move)), "a job has ended, and somebody touches its rows"
        if job.load:
            assert sorted(effect.done, reverse=True) == list(effect.done), "a prefix"
            for row, key, done in zip(job.rows, job.keys, effect.done, strict=True):
                assert not done or self.contents["engine", row] == Content(key, self.epoch), "a wrong block was given"
        self.free_rows += job.rows
        self.ended[effect.job] = effect.done

    def check(self) -> None:
        """Compare what was announced and what the media have with what the machine thinks."""
        self.machine.check()
        for name, tier in self.machine.tiers.items():
            assert self.announced.get(name, set()) == set(tier.index), name
            if name in LOWER:
                busy = {slot for move in self.open_moves.values() for slot in slots_of(move)}
                records = {slot[1]: record.key for slot, record in self.records.items() if slot[0] == name}
                for key, slot in tier.index.items():
                    assert records.pop(slot) == key
                assert {(name, slot) for slot in records} <= busy, "a record would come back"

    # --- helpers

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _rows(self, count: int) -> list[int]:
        rows, self.free_rows = self.free_rows[:count], self.free_rows[count:]
        return rows

    def _job(
        self, kind: type, keys: Sequence[BlockKey], rows: list[int], hints: dict[str, float], **more: object
    ) -> int:
        id = self._id()
        keys = keys[: len(rows)]
        self.jobs[id] = Job(keys, rows, kind is events.BlocksWanted)
        self.post(kind(job=id, keys=keys, rows=rows, hints=events.BlockHints(**hints), **more))  # type: ignore[arg-type]
        return id


def slots_of(move: events.Move) -> list[Slot]:
    """All slots that a move reads, then those that it writes; a peer's have no number here, and are all apart."""
    sources = [(f"{move.peer} {move.id}" if move.source == "peer" else move.source, slot) for slot in move.source_slots]
    return [*sources, *((move.target, slot) for slot in move.target_slots)]


def way(move: events.Move) -> tuple[str, str, str]:
    return move.source, move.target, move.peer


def random_step(world: World) -> None:
    """Let something happen."""
    rng = world.rng
    chain = rng.randrange(len(CHAINS))
    first, count = rng.randrange(12), rng.randint(1, 8)
    keys = CHAINS[chain][first : first + count]
    dice = rng.random()
    if world.asks and rng.random() < 0.5:
        world.answer_peer(rng.choice(sorted(world.asks)), rng.choice((0, 2, 100)))
    elif world.open_moves and dice < 0.45:
        faulty = rng.random() < world.faults
        share = rng.choice((0.2, 1.0))
        world.end_move(
            rng.choice(sorted(world.open_moves)),
            (lambda _: rng.random() < share) if faulty else None,
            rng.choice((0.0, 0.001, 0.5)),
        )
    elif dice < 0.62 and len(world.free_rows) > 20:
        world.store(chain, rng.choice((0, first)), count, priority=rng.randrange(3), pin=rng.choice((0, 0, 0, 0.005)))
    elif dice < 0.72 and len(world.free_rows) > 20:
        deadline = {"deadline": rng.choice((0.001, 0.01))} if rng.random() < 0.3 else {}
        world.load(CHAINS[chain][rng.choice((0, first)) :][:count], priority=rng.randrange(2), **deadline)
    elif dice < 0.78:
        world.ask(CHAINS[chain][: first + count])
    elif dice < 0.82:
        world.pass_time(rng.choice((1, 1, 1, 5, 5, 5, 100, 12_000)) * MILLISECOND)
    elif dice < 0.85:
        world.post(events.PrefetchWanted(keys=CHAINS[chain][: first + count]))
    elif dice < 0.88 and world.jobs:
        world.cancel(rng.choice(sorted(world.jobs)))
    elif dice < 0.91:
        world.post(events.BlocksUsed(keys=keys))
    elif dice < 0.93:
        world.post(events.BlocksPinned(keys=keys, until=rng.choice((0, world.now + 50 * MILLISECOND))))
    elif dice < 0.94 and world.faults:
        world.damage()
    elif dice < 0.95:
        world.post(events.EngineSpeed(seconds_per_token=rng.choice((0.0, 1e-6, 1e-3))))
    elif dice < 0.96:
        world.post(events.PeersChanged(peers=rng.choice(((), PEERS[:1], PEERS, PEERS[::-1]))))
    elif dice < 0.97:
        world.restart()
    elif dice < 0.975:
        world.clear(rng.choice((None, "host", "disk", "object")))
    elif dice < 0.98:
        world.crash()
