"""`SimulatedFleet`: simulated workers that start, serve, drain, fail and come back, and the GPU time of each."""

import math
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock.kernel.values import RequestId, Role, WorkerCard, WorkerId
from penstock_lab.engine.block_cache import BlockCache
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.itl_histogram import ItlHistogram
from penstock_lab.engine.run_cache import RunCache
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.simulate.tiers.simulated_tiers import SimulatedTiers
from penstock_lab.simulate.tiers.tier_assembly import tiers_of

State = Literal["starting", "ready", "draining"]


@dataclass(slots=True)
class PaidLife:
    """One worker's time, for the bill: from the moment that it was started, whether or not it served."""

    worker: WorkerId
    pool: str
    gpus: int
    started: Nanos
    ready: Nanos | None = None
    ended: Nanos | None = None
    woken: bool = False
    """Whether it slept before, and was not started."""
    why: str = ""
    """Why it ended; empty while it has not."""

    def gpu_seconds(self, end: Nanos) -> float:
        """Return GPUs times seconds up to its end, or up to ``end``."""
        until = end if self.ended is None else min(self.ended, end)
        return self.gpus * max(0, until - self.started) / SECOND


@dataclass(slots=True)
class SimulatedWorker:
    """One engine that is there."""

    card: WorkerCard
    pool: str
    engine: Engine
    life: PaidLife
    serial: int
    """Of the effect that started it."""
    ready_at: Nanos
    state: State = "starting"
    counted: int = 0
    """Serial under which its drain is followed."""
    sequence: int = 0
    """Sequence number of its next batch of KV events."""
    running: dict[str, RequestId] = field(default_factory=dict)
    """Requests that it was given and that have not ended: the engine's id -> the request's."""
    stages: set[str] = field(default_factory=set)
    """Those of ``running`` that are a stage before a request's last one."""
    kv_retained: set[str] = field(default_factory=set)
    """Requests that have ended here and whose KV waits to be fetched, by the engine's id."""
    adapters: dict[str, Nanos] = field(default_factory=dict)
    """LoRA adapters in its memory or on their way there, and from when on each may be used."""
    adapters_loaded: Nanos = 0
    """When the last of them is there: an engine loads one at a time."""
    awaiting: set[str] = field(default_factory=set)
    """Those of ``running`` that wait for their adapter, and are not known to the engine yet."""

    @property
    def idle(self) -> bool:
        """Whether it may end without loss to any request."""
        return not self.running and not self.kv_retained

    @property
    def id(self) -> WorkerId:
        return self.card.id


class SimulatedFleet:
    """Make and forget workers; the caller informs the router.

    Args:
        plan: pools and start-up times.
        rng: of the start-up times.
    """

    def __init__(self, plan: SimulationPlan, rng: random.Random) -> None:
        self.plan = plan
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.prefetched_earlier: dict[str, int] = {}
        """What `prefetched` counts, of workers that are gone."""
        self.lives: list[PaidLife] = []
        self.peers: dict[str, SimulatedTiers] = {}
        """Tiers of the engines that fetch from each other."""
        self.asleep: dict[WorkerId, Nanos] = {}
        """Workers that sleep, and since when."""
        self.slept: Nanos = 0
        """Sum of the sleeps that are over."""
        self.gaps: list[ItlHistogram] = []
        """Waits between tokens, of every engine that ever ran; none of those that speculate."""
        self._rng = rng
        self._epochs: dict[WorkerId, int] = {}

    def start(self, pool: str, now: Nanos, worker: WorkerId, serial: int, *, woken: bool = False) -> SimulatedWorker:
        """Start a worker, or wake one that sleeps: its cache is empty in either case."""
        first = now == 0 and worker not in self._epochs
        epoch = self._epochs[worker] = self._epochs.get(worker, 0) + 1
        kind = self.plan.pools[pool]
        life = PaidLife(worker, pool, kind.gpus, now, woken=woken)
        self.lives.append(life)
        form = BlockCache if self.plan.single_blocks else RunCache
        tiers = partial(tiers_of, kind.cache, table=kind.table, name=worker, peers=self.peers)
        engine = Engine(kind.sim, table=kind.table, cache=form, tiers=tiers)
        if not self.plan.router.hears_engines:
            engine.mute_kv_events()
        card = _engine_card(self.plan.model, worker, epoch, kind)
        # What the run begins with serves already.
        wait = 0 if first else nanos(kind.sim.wake_time) if woken else self._start_up(pool, kind)
        made = SimulatedWorker(card, pool, engine, life, serial, now + wait)
        if not kind.sim.num_speculative_tokens:
            self.gaps.append(made.engine.count_gaps())
        self.workers[worker] = made
        return made

    def end(self, worker: SimulatedWorker, now: Nanos, why: str) -> None:
        """Forget a worker."""
        self._count_prefetched(self.prefetched_earlier, worker)
        del self.workers[worker.id]
        self.peers.pop(worker.id, None)
        worker.life.ended = now
        worker.life.why = why

    def sleep(self, worker: SimulatedWorker, now: Nanos) -> Nanos:
        """Let a worker sleep; return from when on it has no GPUs."""
        asleep_at = now + nanos(self.plan.pools[worker.pool].sim.wake_time)
        self.end(worker, asleep_at, "it sleeps")
        self.asleep[worker.id] = asleep_at
        return asleep_at

    def sleep_ended(self, worker: WorkerId, now: Nanos) -> None:
        """A worker that may have slept is woken or ended."""
        since = self.asleep.pop(worker, None)
        self.slept += 0 if since is None else max(0, now - since)

    def asleep_hours(self, end: Nanos) -> float:
        """Return the hours that workers slept up to ``end``: paid in host memory, not in GPUs."""
        return (self.slept + sum(max(0, end - since) for since in self.asleep.values())) / SECOND / 3600

    def prefetched(self) -> dict[str, int]:
        """Return what all workers' tiers brought up ahead, in blocks, and what came of it; empty without tiers."""
        counts = dict(self.prefetched_earlier)
        for worker in self.workers.values():
            self._count_prefetched(counts, worker)
        return counts

    @staticmethod
    def _count_prefetched(counts: dict[str, int], worker: SimulatedWorker) -> None:
        tiers = worker.engine.tiers
        for name, blocks in ({} if tiers is None else tiers.prefetched()).items():
            counts[name] = counts.get(name, 0) + blocks

    def publish_anew(self, worker: SimulatedWorker, role: Role) -> WorkerCard:
        """Let a drained worker take requests again, maybe in another role, and return its card from now on."""
        epoch = self._epochs[worker.id] = self._epochs[worker.id] + 1
        kind = msgspec.structs.replace(self.plan.pools[worker.pool], role=role)
        born = worker.card.incarnation
        worker.card = msgspec.structs.replace(_engine_card(self.plan.model, worker.id, epoch, kind), started_epoch=born)
        worker.state = "ready"
        return worker.card

    def of(self, pool: str) -> list[SimulatedWorker]:
        """Return a pool's workers, the eldest first."""
        return [worker for worker in self.workers.values() if worker.pool == pool]

    def lookups(self) -> dict[str, tuple[int, int]]:
        """Return, per pool, how often its present engines looked up their timing, and how often beyond its data."""
        found: dict[str, tuple[int, int]] = {}
        for worker in self.workers.values():
            asked, beyond = found.get(worker.pool, (0, 0))
            timing = worker.engine.timing
            found[worker.pool] = (asked + timing.lookups, beyond + timing.extrapolated)
        return found

    def gpu_hours(self, end: Nanos) -> float:
        """Return GPU-hours of all workers up to ``end``, their starting and draining included."""
        return sum(life.gpu_seconds(end) for life in self.lives) / 3600

    def _start_up(self, pool: str, kind: PoolPlan) -> Nanos:
        start_up = self.plan.start_up
        if not start_up.median:
            shared = kind.share_weights and any(other.state == "ready" for other in self.of(pool))
            sibling = kind.sim.sibling_load_time
            return nanos(kind.sim.load_time if sibling is None or not shared else sibling)
        if not start_up.sigma:
            return nanos(start_up.median)
        return nanos(self._rng.lognormvariate(math.log(start_up.median), start_up.sigma))


def _engine_card(model: str, worker: WorkerId, epoch: int, pool: PoolPlan) -> WorkerCard:
    """Return the card of the live engine of these settings."""
    sim = pool.sim
    return WorkerCard(
        id=worker,
        epoch=epoch,
        model=model,
        url=f"virtual://{worker}",
        engine="sim",
        block_size=sim.block_size,
        kv_blocks=sim.blocks,
        max_num_seqs=sim.max_num_seqs,
        max_num_batched_tokens=sim.max_num_batched_tokens,
        max_model_len=sim.max_model_len,
        role=pool.role,
        handoff=pool.handoff,
        hash_scheme=SCHEME,
        events=(f"virtual://{worker}/events",),
        adapter_slots=pool.adapter_slots,
    )
