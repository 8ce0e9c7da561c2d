"""A whole cluster on virtual time: the production router over small model engines that can be killed at any moment.

The engines here are the plainest that can go wrong in every way: a set of blocks as cache, a list of running
attempts, a bounded replay buffer. They are the truth that the router's view is compared with.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.kernel.hashing import SCHEME, block_hashes
from penstock.kernel.machine import SECOND, Effect, Event, Nanos
from penstock.kernel.simulation import Answer, Simulation
from penstock.kernel.values import (
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    MediaItem,
    Prompt,
    RequestId,
    Role,
    Slo,
    Target,
    WorkerCard,
    WorkerId,
)
from penstock.router import model_pool
from penstock.router.events import (
    Abort,
    Arrived,
    Cancelled,
    Closed,
    Decision,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    KvObserved,
    Preferences,
    Release,
    ReplayEnded,
    ReplayWanted,
    Resume,
    Staged,
    WorkerCordoned,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from penstock.router.router import Router
from penstock.router.settings import (
    BreakerSettings,
    HandoffSettings,
    HedgeSettings,
    MigrationSettings,
    QueueSettings,
    RouterSettings,
)

BLOCK = 16
MODEL = "m"
ROLES: tuple[tuple[Role, ...], ...] = (
    ("aggregated",),
    ("prefill", "decode", "decode"),
    ("prefill", "prefill", "decode"),
    ("prefill", "decode", "aggregated"),
    ("encode", "prefill", "prefill", "decode", "decode"),
)
"""Of the workers, in turn."""


@dataclass
class ModelEngine:
    """The truth about one worker."""

    card: WorkerCard
    capacity: int
    alive: bool = True
    joined: bool = True
    blocks: dict[int, None] = field(default_factory=dict)
    sequence: int = 0
    buffer: list[KvObserved] = field(default_factory=list)
    running: dict[tuple[RequestId, int], bool] = field(default_factory=dict)
    stages: set[tuple[RequestId, int]] = field(default_factory=set)
    """Those of them that are a stage before the last."""
    held: set[tuple[RequestId, int]] = field(default_factory=set)
    """KV that waits to be fetched."""


class Cluster:
    """Drive a router through ``steps`` random happenings and keep the books that its invariants are held against."""

    def __init__(self, seed: int, *, workers: int = 3, requests: int = 40, faults: bool = True) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.faults = faults
        self.settings = RouterSettings(
            mode=rng.choice(("kv", "kv", "round_robin", "least_loaded", "power_of_two", "random")),
            queue=QueueSettings(
                threshold=rng.choice((None, 0.0, 0.1)),
                policy=rng.choice(("fcfs", "lcfs", "wspt", "edf")),
                length_max=rng.choice((2, 50)),
                wait_max=rng.choice((0.5, 30.0)),
            ),
            breaker=BreakerSettings(failures=rng.choice((1, 3)), open_for=0.5),
            attempts_max=rng.choice((1, 2, 3)),
            hedge=HedgeSettings(after=rng.choice((None, 0.1, 0.4)), share=1.0),
            migration=MigrationSettings(limit=rng.choice((0, 1, 3))),
            inflight_max=rng.choice((5, 1000)),
            request_timeout=rng.choice((2.0, 60.0)),
            handoff=HandoffSettings(
                conditional=rng.choice(("auto", "slo", "thresholds", "off", "off")),
                new_tokens_max=rng.choice((0, 64)),
            ),
        )
        model_pool.FALLBACK_SHARE = rng.choice((0.0, 0.5))
        model_pool.FALLBACK_BURST = rng.choice((0, 10))
        self.roles = rng.choice(ROLES)
        self.protocol = rng.choice(("completed", "completed", "push", "bootstrap"))
        self.unwanted: set[tuple[RequestId, int]] = set()
        """Of what is not made yet."""
        self.stranded = 0
        self.handoffs = 0
        self.router = Router(self.settings, slo=rng.choice((Slo(), Slo(ttft=0.5, itl=0.02))), seed=seed)
        self.engines: dict[WorkerId, ModelEngine] = {}
        self.closed: dict[RequestId, list[Closed]] = {}
        self.arrived: list[RequestId] = []
        self.decisions: list[Decision] = []
        self.fetches: dict[tuple[RequestId, int], tuple[RequestId, int]] = {}
        """Attempt that fetches -> the one that makes."""
        self.open_attempts: dict[RequestId, int] = {}
        self.isl: dict[RequestId, int] = {}
        self.resumed: dict[RequestId, int] = {}
        self.migrations = 0
        self.problems: list[str] = []
        self.run = Simulation({"router": self.router}, self.world, checked=True, watch=self.watch)
        for number in range(max(workers, len(self.roles))):
            self.start_engine(WorkerId(f"w{number}"), epoch=1, at=0)
        at = 0
        for number in range(requests):
            at += round(rng.expovariate(8.0) * SECOND)
            self.arrive(RequestId(f"r{number}"), at)
        self.horizon = at
        if faults:
            for _ in range(rng.randrange(8)):
                self.fault(round(rng.random() * at))

    # --- what happens -----------------------------------------------------------------------------------------------

    def arrive(self, request: RequestId, at: Nanos) -> None:
        rng = self.rng
        system = rng.randrange(4)
        tokens = [system * 1000 + i for i in range(BLOCK * 4)]
        tokens += [rng.randrange(10**6) for _ in range(rng.randrange(BLOCK * 6))]
        wish = Preferences(priority=rng.randrange(3), strict=rng.randrange(2))
        deadline = at + round(rng.uniform(0.2, 3.0) * SECOND) if rng.random() < 0.2 else None
        event = Arrived(
            id=request,
            model=MODEL,
            prompt=Prompt(len(tokens), list(block_hashes(tokens, BLOCK))),
            preferences=wish,
            deadline=deadline,
            media=rng.choice(((), (), (MediaItem("cat", 64), MediaItem(rng.choice(("dog", "cow")), 64), MediaItem()))),
            whole=rng.random() < 0.1,
        )
        self.arrived.append(request)
        self.isl[request] = len(tokens)
        self.run.post(at, "router", event)
        if rng.random() < 0.15:
            self.run.post(at + round(rng.expovariate(2.0) * SECOND), "router", Cancelled(id=request))

    def start_engine(self, worker: WorkerId, epoch: int, at: Nanos) -> None:
        card = WorkerCard(
            id=worker,
            epoch=epoch,
            model=MODEL,
            url=f"http://{worker}",
            block_size=BLOCK,
            kv_blocks=40,
            max_num_batched_tokens=256,
            hash_scheme=SCHEME,
            events=("tcp://x",),
            replay=("tcp://y",),
            role=self.roles[int(worker[1:]) % len(self.roles)],
            handoff=self.protocol,
        )
        self.engines[worker] = ModelEngine(card, capacity=40)
        self.run.post(at, "router", WorkerJoined(card=card))

    def fault(self, at: Nanos) -> None:
        worker = WorkerId(f"w{self.rng.randrange(len(self.engines))}")
        kind = self.rng.choice(("kill", "kill", "drain", "cordon", "forget", "clear"))
        self.run.post(at, "chaos", Fault(worker=worker, kind=kind))
        self.run.machines.setdefault("chaos", Chaos(self))

    def world(self, now: Nanos, name: str, effect: Effect) -> Iterable[Answer]:
        if isinstance(effect, Dispatch):
            yield from self.dispatched(now, effect)
        elif isinstance(effect, Abort):
            engine = self.engines[effect.target.worker]
            engine.running.pop((effect.id, effect.attempt), None)
            engine.stages.discard((effect.id, effect.attempt))
            # As a frontend does: what it was to fetch is fetched all the same, by another if need be, and then dropped.
            self.let_go(self.fetches.pop((effect.id, effect.attempt), None))
        elif isinstance(effect, Release):
            if effect.target is None:
                self.stranded += 1
            self.let_go((effect.id, effect.attempt))
        elif isinstance(effect, ReplayWanted):
            yield self.replay(now, effect)

    def let_go(self, leg: tuple[RequestId, int] | None) -> None:
        """Nobody will fetch this any more, or somebody just has."""
        if leg is None:
            return
        for engine in self.engines.values():
            if leg in engine.stages:
                self.unwanted.add(leg)
            engine.held.discard(leg)

    def dispatched(self, now: Nanos, effect: Dispatch) -> Iterable[Answer]:
        rng, engine = self.rng, self.engines[effect.target.worker]
        self.decisions.append(effect.decision)
        key = (effect.id, effect.attempt)
        handoff = effect.handoff
        if handoff is not None and handoff.source is not None:
            source = (effect.id, handoff.source_attempt)
            if self.protocol == "completed":
                holder = self.engines[handoff.source.id]
                there = engine.alive and holder.alive and holder.card.epoch == handoff.source.epoch
                if there and source not in holder.held:
                    self.problems.append(f"{effect.id} is to fetch what {handoff.source.id} does not hold")
                self.fetches[key] = source
        refused = not engine.alive or (self.faults and rng.random() < 0.05)
        if refused or engine.card.epoch != effect.card.epoch:
            wait = round(rng.random() * 0.05 * SECOND)
            yield now + wait, "router", Failed(id=effect.id, attempt=effect.attempt, reason="refused", retryable=True)
            return
        engine.running[key] = False
        if effect.stage in ("prefill", "encode"):
            engine.stages.add(key)
        first = now + round(rng.expovariate(4.0) * SECOND)
        last = first + round(rng.expovariate(4.0) * SECOND)
        yield (
            first,
            "engines",
            Milestone(
                worker=effect.target.worker, epoch=engine.card.epoch, id=effect.id, attempt=effect.attempt, last=False
            ),
        )
        yield (
            last,
            "engines",
            Milestone(
                worker=effect.target.worker, epoch=engine.card.epoch, id=effect.id, attempt=effect.attempt, last=True
            ),
        )
        self.run.machines.setdefault("engines", Engines(self))

    def resume(self, request: RequestId) -> Resume | None:
        """Where another engine could go on, for the requests that can."""
        open_request = self.router.requests.get(request)
        if open_request is None or self.rng.random() < 0.2:
            return None
        more = self.rng.randrange(1, 40)
        self.resumed[request] = self.resumed.get(request, 0) + more
        prompt = open_request.prompt
        return Resume(prompt=Prompt(prompt.isl + more, prompt.blocks), tokens=self.resumed[request])

    def replay(self, now: Nanos, wanted: ReplayWanted) -> Answer:
        engine = self.engines[wanted.worker]
        batches = [b for b in engine.buffer if b.sequence >= wanted.first] if engine.alive else None
        return now + SECOND // 100, "router", ReplayEnded(id=wanted.id, batches=batches)

    def cache(self, engine: ModelEngine, blocks: list[int]) -> list[Answer]:
        """Store a prompt's blocks, evict what is too much, and publish both; some messages get lost on the way."""
        rng = self.rng
        new = [block for block in blocks if block not in engine.blocks]
        parent = blocks[blocks.index(new[0]) - 1] if new and blocks.index(new[0]) else None
        events: list[KvEvent] = []
        if new:
            events.append(KvStored(hashes=new, parent=parent, block_size=BLOCK))
            engine.blocks.update(dict.fromkeys(new))
        while len(engine.blocks) > engine.capacity:
            victim = next(iter(engine.blocks))
            del engine.blocks[victim]
            events.append(KvRemoved(hashes=[victim]))
        return self.publish(engine, events, lost=self.faults and rng.random() < 0.1)

    def publish(self, engine: ModelEngine, events: list[KvEvent], lost: bool) -> list[Answer]:
        if not events:
            return []
        batch = KvObserved(
            worker=engine.card.id, rank=0, epoch=engine.card.epoch, sequence=engine.sequence, events=events
        )
        engine.sequence += 1
        engine.buffer = [*engine.buffer, batch][-20:]
        copies = 0 if lost else 2 if self.faults and self.rng.random() < 0.05 else 1
        late = round(self.rng.random() * 0.02 * SECOND)
        return [(self.run.now + late, "router", batch)] * copies

    # --- the books --------------------------------------------------------------------------------------------------

    def watch(self, now: Nanos, name: str, event: Event, effects: list[Effect]) -> None:
        if name != "router":
            return
        for effect in effects:
            if isinstance(effect, Closed):
                self.closed.setdefault(effect.id, []).append(effect)
            elif isinstance(effect, Dispatch):
                if effect.id in self.closed:
                    self.problems.append(f"{effect.id} was dispatched after its end")
                if effect.attempt != self.open_attempts.get(effect.id, 0) + 1:
                    self.problems.append(f"{effect.id} jumped to attempt {effect.attempt}")
                self.open_attempts[effect.id] = effect.attempt
                worker = self.router.roster.get(effect.target.worker)
                if worker is None or worker.state != "ready" or worker.cordons:
                    self.problems.append(f"{effect.id} went to {effect.target}, which was no candidate")
        for pool in self.router.pools.values():
            if len(pool.queue) > self.settings.queue.length_max:
                self.problems.append("the queue is longer than its limit")

    def finish(self) -> None:
        """Run to the end and hold the invariants against the books."""
        self.run.run()
        for engine in self.engines.values():
            if engine.alive:  # a lost message shows only when the next one comes
                for at, machine, batch in self.publish(engine, [KvRemoved(hashes=[0])], lost=False):
                    self.run.post(at, machine, batch)
        self.run.run()
        assert not self.problems, self.problems
        for request in self.arrived:
            ends = self.closed.get(request, [])
            assert len(ends) == 1, f"{request} has {len(ends)} terminal effects: {ends}"
            end = ends[0]
            legs = 2 * self.settings.attempts_max + (self.settings.hedge.after is not None) * self.settings.attempts_max
            # Beside each try there may be a stage before it, and two of them may fail to fetch what one made.
            assert end.attempts <= (legs + 3 * (len(self.roles) > 1)) * (end.migrations + 1)
            assert end.migrations <= self.settings.migration.limit
            assert end.isl == self.isl[request], "a migration must not change what the prompt is said to be"
            self.migrations += end.migrations
        assert not self.router.requests
        self.handoffs = sum(pool.counts.handoffs["done"] for pool in self.router.pools.values())
        if not self.stranded:
            for engine in self.engines.values():
                # One that the router lost sight of lets go by its own time-out.
                assert not (engine.alive and engine.joined and engine.held), (
                    f"{engine.card.id} holds {engine.held} for nobody"
                )
        for pool in self.router.pools.values():
            assert len(pool.active) == 0 and len(pool.queue) == 0 and pool.counts.inflight == 0

    def overclaimed(self) -> list[str]:
        """Return where the index claims blocks that a living engine does not hold."""
        pool = self.router.pools[MODEL]
        if pool.index.exact is None:
            return []
        wrong = []
        for worker, engine in self.engines.items():
            held = pool.index.exact.blocks_of(Target(worker))
            if engine.alive and engine.joined and not held <= set(engine.blocks):
                wrong.append(f"{worker} claims {len(held - set(engine.blocks))} blocks too many")
        return wrong


class Fault(Event, frozen=True, kw_only=True):
    worker: WorkerId
    kind: str


class Milestone(Event, frozen=True, kw_only=True):
    worker: WorkerId
    epoch: int
    id: RequestId
    attempt: int
    last: bool


class _Bookless:
    """The world's own machines keep no state of their own: what they do stands in the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def snapshot(self) -> dict[str, object]:
        return {"version": 1}

    def restore(self, snapshot: dict[str, object]) -> None: ...

    def check(self) -> None: ...


class Engines(_Bookless):
    """Let attempts reach their first and last token, unless their engine died or they were aborted."""

    def handle(self, now: Nanos, event: Event) -> list[Effect]:
        assert isinstance(event, Milestone)
        cluster = self.cluster
        engine = cluster.engines[event.worker]
        key = (event.id, event.attempt)
        if not engine.alive or engine.card.epoch != event.epoch or key not in engine.running:
            return []
        if key in engine.stages:
            if event.last:
                engine.stages.discard(key)
                del engine.running[key]
                held = cluster.rng.random() < 0.95
                makes = engine.card.role == "prefill" and cluster.protocol == "completed"
                if held and makes and key not in cluster.unwanted:
                    engine.held.add(key)
                cluster.run.post(now, "router", Staged(id=event.id, attempt=event.attempt, kv_retained=held, cached=0))
            return []
        if event.last:
            del engine.running[key]
            cluster.run.post(now, "router", Finished(id=event.id, attempt=event.attempt, tokens=9))
        else:
            engine.running[key] = True
            cluster.let_go(cluster.fetches.pop(key, None))
            request = cluster.router.requests.get(event.id)
            if request is not None:
                for at, machine, answer in cluster.cache(engine, request.prompt.blocks):
                    cluster.run.post(at, machine, answer)
            cluster.run.post(now, "router", FirstToken(id=event.id, attempt=event.attempt))
        return []


class Chaos(_Bookless):
    """Kill, drain, cordon, forget and clear; a killed engine comes back with a newer epoch."""

    def handle(self, now: Nanos, event: Event) -> list[Effect]:
        assert isinstance(event, Fault)
        cluster, rng = self.cluster, self.cluster.rng
        engine = cluster.engines[event.worker]
        epoch = engine.card.epoch
        if event.kind == "kill" and engine.alive:
            engine.alive = False
            for (request, attempt), streaming in list(engine.running.items()):
                late = now + round(rng.random() * 0.2 * SECOND)
                cluster.run.post(
                    late,
                    "router",
                    Failed(
                        id=request,
                        attempt=attempt,
                        reason="connection reset",
                        retryable=not streaming or cluster.resumed.get(request, 0) > 0,
                        resume=cluster.resume(request) if streaming else None,
                    ),
                )
            engine.running.clear()
            engine.stages.clear()
            engine.held.clear()
            noticed = now + round(rng.random() * 2.0 * SECOND)
            cluster.run.post(noticed, "router", WorkerLeft(worker=event.worker, epoch=epoch, reason="killed"))
            if rng.random() < 0.7:
                back = now + round(rng.random() * 3.0 * SECOND)
                cluster.run.post(back, "chaos", Fault(worker=event.worker, kind="restart"))
        elif event.kind == "restart":
            cluster.start_engine(event.worker, epoch + 1, now)
        elif event.kind == "drain":
            cluster.run.post(now, "router", WorkerDraining(worker=event.worker, epoch=epoch))
        elif event.kind == "cordon":
            cluster.run.post(now, "router", WorkerCordoned(worker=event.worker, on=True, reason="test"))
            later = now + round(rng.random() * SECOND)
            cluster.run.post(later, "router", WorkerCordoned(worker=event.worker, on=False, reason="test"))
        elif event.kind == "forget":  # the lease lapses while the engine lives on
            engine.joined = False
            cluster.run.post(now, "router", WorkerLeft(worker=event.worker, epoch=epoch, reason="lease"))
        elif event.kind == "clear" and engine.alive:
            engine.blocks.clear()
            for at, machine, answer in cluster.publish(engine, [KvCleared()], lost=False):
                cluster.run.post(at, machine, answer)
        return []
