"""Which simulated workers are there? They start, serve, drain, fail and come back; each one's time is paid for."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.engine.engine import Engine
from penstock.engine.gaps import Gaps
from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock.kernel.values import RequestId, Role, WorkerCard, WorkerId
from penstock.simulate.plan import Plan, PoolPlan

State = Literal["starting", "ready", "draining"]


@dataclass(slots=True)
class Life:
    """One worker's time, for the bill: from the moment that it was started, whether or not it served."""

    worker: WorkerId
    pool: str
    gpus: int
    started: Nanos
    ready: Nanos | None = None
    ended: Nanos | None = None
    why: str = ""
    """Why it ended; empty while it has not."""

    def gpu_seconds(self, end: Nanos) -> float:
        """Return GPUs times seconds up to its end, or up to ``end``."""
        until = end if self.ended is None else min(self.ended, end)
        return self.gpus * max(0, until - self.started) / SECOND


@dataclass(slots=True)
class Worker:
    """One engine that is there."""

    card: WorkerCard
    pool: str
    engine: Engine
    life: Life
    state: State = "starting"
    becomes: Role | None = None
    """What it does once it has been drained; None where it then ends."""
    sequence: int = 0
    """Of its next batch of KV events."""
    running: dict[str, RequestId] = field(default_factory=dict)
    """What it was given and has not ended: the engine's id of it -> the request's."""
    stages: set[str] = field(default_factory=set)
    """Those of it that are a stage before a request's last one."""
    held: set[str] = field(default_factory=set)
    """What has ended here and waits to be fetched, by the engine's id."""

    @property
    def idle(self) -> bool:
        """Whether it may end without anybody's loss."""
        return not self.running and not self.held

    @property
    def id(self) -> WorkerId:
        return self.card.id


class Fleet:
    """Make and forget workers; what the router hears of it is the caller's to say.

    Args:
        plan: pools and start-up times.
        rng: of the start-up times.
    """

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan = plan
        self.workers: dict[WorkerId, Worker] = {}
        self.lives: list[Life] = []
        self.gaps: list[Gaps] = []
        """Waits between tokens, of every engine that ever ran; none of those that speculate."""
        self._rng = rng
        self._numbers: dict[str, Iterator[int]] = {}
        self._epochs: dict[WorkerId, int] = {}

    def start(self, pool: str, now: Nanos, worker: WorkerId | None = None) -> tuple[Worker, Nanos]:
        """Start a worker, or start a given one again; return it and when it will be ready."""
        if worker is None:
            number = next(self._numbers.setdefault(pool, _counting()))
            worker = WorkerId(f"{pool}-{number}")
        epoch = self._epochs[worker] = self._epochs.get(worker, 0) + 1
        kind = self.plan.pools[pool]
        life = Life(worker, pool, kind.gpus, now)
        self.lives.append(life)
        engine = Engine(kind.sim, table=kind.table, runs=not self.plan.by_block)
        if not self.plan.router.hears_engines:
            engine.hush()
        made = Worker(_card(self.plan.model, worker, epoch, kind), pool, engine, life)
        if not kind.sim.speculative_tokens:
            self.gaps.append(made.engine.count_gaps())
        self.workers[worker] = made
        return made, now + self._start_up()

    def end(self, worker: Worker, now: Nanos, why: str) -> None:
        """Forget a worker."""
        del self.workers[worker.id]
        worker.life.ended = now
        worker.life.why = why

    def flip(self, worker: Worker, role: Role) -> WorkerCard:
        """Give a worker that has nothing to do another role, and return what it says of itself from now on."""
        epoch = self._epochs[worker.id] = self._epochs[worker.id] + 1
        kind = msgspec.structs.replace(self.plan.pools[worker.pool], role=role)
        born = worker.card.incarnation
        worker.card = msgspec.structs.replace(_card(self.plan.model, worker.id, epoch, kind), born=born)
        worker.state, worker.becomes = "ready", None
        return worker.card

    def of(self, pool: str) -> list[Worker]:
        """Return a pool's workers, the eldest first."""
        return [worker for worker in self.workers.values() if worker.pool == pool]

    def wanted(self, pool: str) -> list[Worker]:
        """Return those of a pool that are to stay, also where they change their role first."""
        return [worker for worker in self.of(pool) if worker.state != "draining" or worker.becomes is not None]

    def gpu_hours(self, end: Nanos) -> float:
        """Return GPU-hours of all workers up to ``end``, their starting and draining included."""
        return sum(life.gpu_seconds(end) for life in self.lives) / 3600

    def _start_up(self) -> Nanos:
        start_up = self.plan.start_up
        if not start_up.median:
            return 0
        if not start_up.sigma:
            return nanos(start_up.median)
        return nanos(self._rng.lognormvariate(math.log(start_up.median), start_up.sigma))


def _card(model: str, worker: WorkerId, epoch: int, pool: PoolPlan) -> WorkerCard:
    """Return what the live engine of these settings says of itself."""
    sim = pool.sim
    return WorkerCard(
        id=worker,
        epoch=epoch,
        model=model,
        url=f"virtual://{worker}",
        engine="sim",
        block_size=sim.block_size,
        kv_blocks=sim.kv_blocks,
        max_seqs=sim.max_seqs,
        max_batched_tokens=sim.max_batched_tokens,
        max_len=sim.max_len,
        role=pool.role,
        handoff=pool.handoff,
        hash_scheme=SCHEME,
        events=(f"virtual://{worker}/events",),
    )


def _counting() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
