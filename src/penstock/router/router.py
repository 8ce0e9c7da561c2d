"""The router machine: a request's life from arrival to its one end, over the workers that are there.

It owns the roster, one `Pool` per model and the open requests. Everything it decides leaves as an effect with its
reason: a `Dispatch` carries the table of candidates, a `Closed` says whose fault an end was.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Wake, Woken, nanos, seconds
from penstock.kernel.values import RequestId, Target
from penstock.router.events import (
    Abort,
    Arrived,
    Cancelled,
    Closed,
    Decision,
    Dispatch,
    Excluded,
    Failed,
    Fault,
    Finished,
    FirstToken,
    Grown,
    KvObserved,
    KvSourceLost,
    Leg,
    Noted,
    Outcome,
    PeerGone,
    PeerUpdate,
    Placement,
    Publish,
    ReplayEnded,
    ReplayWanted,
    WorkerCordoned,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerMeasured,
    WorkerReady,
)
from penstock.router.kv_stream import KvStream, StreamOutcome
from penstock.router.pool import Pool
from penstock.router.queue import Waiting
from penstock.router.request import Request
from penstock.router.roster import Roster, Worker
from penstock.router.select import Choice, discounted, pinned, select
from penstock.router.settings import RouterSettings
from penstock.router.status import router_status

Timer = Literal["deadline", "wait", "kick", "sweep"]
SNAPSHOT_VERSION = 1


class Router:
    """Place requests on workers.

    Args:
        settings: the knobs.
        name: this router's name among its peers.
        seed: of the generator that breaks ties and samples.
        shared: True publishes every placement for other routers.
    """

    def __init__(self, settings: RouterSettings, *, name: str = "router", seed: int = 0, shared: bool = False) -> None:
        self.settings = settings
        self.name = name
        self.shared = shared
        self.roster = Roster()
        self.pools: dict[str, Pool] = {}
        self.requests: dict[RequestId, Request] = {}
        self.dropped = 0
        """Events about requests, attempts, workers or replays that are not, or no longer, known."""
        self._rng = random.Random(seed)
        self._timers: list[tuple[Nanos, Timer, str]] = []
        self._armed: Nanos | None = None
        self._replays: dict[int, Target] = {}
        self._replay_id = 0
        self._out: list[Effect] = []
        self._handlers: dict[type[Event], Callable[[Nanos, Any], None]] = {
            Arrived: self._arrived,
            FirstToken: self._first_token,
            Grown: self._grown,
            Finished: self._finished,
            Failed: self._failed,
            Cancelled: self._cancelled,
            WorkerJoined: self._joined,
            WorkerReady: self._ready,
            WorkerLeft: self._left,
            WorkerDraining: self._draining,
            WorkerCordoned: self._cordoned,
            WorkerMeasured: self._measured,
            KvObserved: self._kv_observed,
            ReplayEnded: self._replay_ended,
            KvSourceLost: self._kv_lost,
            PeerUpdate: self._peer_update,
            PeerGone: self._peer_gone,
            Woken: self._woken,
        }

    def handle(self, now: Nanos, event: Event) -> list[Effect]:
        """Take one event; see `penstock.router.events` for both vocabularies."""
        self._out = []
        self._handlers[type(event)](now, event)
        self._arm()
        return self._out

    # --- requests ---------------------------------------------------------------------------------------------------

    def _arrived(self, now: Nanos, event: Arrived) -> None:
        if event.id in self.requests:
            self.dropped += 1
            self._note("duplicate_request", f"request id {event.id} is open already; the second one is ignored")
            return
        limit = now + nanos(self.settings.request_timeout)
        deadline = limit if event.deadline is None else min(event.deadline, limit)
        request = Request(event, arrived=now, deadline=deadline)
        self.requests[event.id] = request
        pool = self.pools.get(event.model)
        if pool is None:
            self._close(now, request, None, "rejected", "overloaded", 503, f"no worker serves {event.model} yet", 1.0)
            return
        pool.inflight += 1
        if pool.inflight > self.settings.inflight_max:
            text = f"{self.settings.inflight_max} requests of {event.model} are running or waiting"
            self._close(now, request, pool, "rejected", "overloaded", 429, text, 1.0)
            return
        self._timer(deadline, "deadline", event.id)
        self._admit(now, request, pool)

    def _admit(self, now: Nanos, request: Request, pool: Pool) -> None:
        """Place a request at once, let it wait, or say why neither can be."""
        targets, excluded = self._eligible(request, pool, now)
        if not targets:
            self._nowhere(now, request, pool, excluded)
        elif self._all_busy(pool, targets) or len(pool.queue):
            self._enqueue(now, request, pool)
            self._pump(now, pool)
        else:
            self._place(now, request, pool, targets, excluded)

    def _eligible(self, request: Request, pool: Pool, now: Nanos) -> tuple[list[tuple[Target, Worker]], list[Excluded]]:
        """Split the pool's targets into candidates and those excluded, each with its reason."""
        event, wish = request.event, request.event.preferences
        targets: list[tuple[Target, Worker]] = []
        excluded: list[Excluded] = []
        for worker in self.roster:
            card = worker.card
            if card.model != pool.model:
                continue
            reason = worker.why_not(now)
            if reason is None and wish.worker is not None and card.id != wish.worker:
                reason = f"the request is pinned to {wish.worker}"
            if reason is None and wish.allowed is not None and card.id not in wish.allowed:
                reason = "is not among the request's allowed workers"
            if reason is None and card.id in request.tried:
                reason = "failed this request before"
            if reason is None and event.adapter is not None and event.adapter not in card.adapters:
                reason = f"has no adapter {event.adapter}"
            if reason is None and card.max_len is not None and event.isl >= card.max_len and not event.text:
                reason = f"takes at most {card.max_len} tokens, the prompt has {event.isl}"
            for target in worker.targets:
                if reason is None and wish.rank is not None and target.rank != wish.rank:
                    excluded.append(Excluded(target=target, reason=f"the request is pinned to rank {wish.rank}"))
                elif reason is None:
                    targets.append((target, worker))
                else:
                    excluded.append(Excluded(target=target, reason=reason))
        return targets, excluded

    def _nowhere(self, now: Nanos, request: Request, pool: Pool, excluded: list[Excluded]) -> None:
        """End a request that no worker can take, by whose fault that is."""
        wish = request.event.preferences
        if request.tried:
            status = request.last_status or 502
            self._close(now, request, pool, "failed", "engine", status, request.last_failure)
            return
        if wish.worker is not None and self.roster.get(wish.worker) is None:
            known = ", ".join(sorted(w.card.id for w in self.roster if w.card.model == pool.model)) or "none"
            text = f"pinned worker {wish.worker!r} does not serve {pool.model}; its workers: {known}"
            self._close(now, request, pool, "rejected", "client", 400, text)
            return
        reasons = "; ".join(f"{e.target} {e.reason}" for e in excluded[:4]) or "none has joined"
        client = bool(excluded) and all(
            "takes at most" in e.reason or "has no adapter" in e.reason or "allowed" in e.reason or "pinned" in e.reason
            for e in excluded
        )
        if client:
            self._close(now, request, pool, "rejected", "client", 400, f"no worker can take the request: {reasons}")
        else:
            text = f"no worker of {pool.model} is available: {reasons}"
            self._close(now, request, pool, "rejected", "overloaded", 503, text, self._next_chance(pool, now))

    def _next_chance(self, pool: Pool, now: Nanos) -> float:
        """Seconds until a breaker lets one try, else one second: what Retry-After says."""
        waits = [
            seconds(worker.breaker.until - now)
            for worker in self.roster
            if worker.card.model == pool.model and worker.breaker.until is not None and worker.breaker.until > now
        ]
        return max(1.0, min(waits, default=1.0))

    def _all_busy(self, pool: Pool, targets: list[tuple[Target, Worker]]) -> bool:
        share = self.settings.queue.threshold
        if share is None:
            return False
        for target, worker in targets:
            most = worker.card.max_batched_tokens
            # A worker that does not tell its batch size can't be called busy by it.
            if most is None or pool.active.load(target).prefill_tokens <= share * most:
                return False
        return True

    def _enqueue(self, now: Nanos, request: Request, pool: Pool) -> None:
        event, wish = request.event, request.event.preferences
        if pool.queue.full:
            text = f"{len(pool.queue)} requests of {pool.model} are waiting, which is the limit"
            self._close(now, request, pool, "rejected", "overloaded", 503, text, 1.0)
            return
        best = max(
            (o.device + o.host + o.disk for o in pool.overlaps(event.blocks, event.text, now).values()), default=0
        )
        request.step("queue")
        request.queued_since = now
        pool.queue.add(
            Waiting(
                id=event.id,
                arrived=request.arrived,
                priority=wish.priority,
                strict=wish.strict,
                deadline=request.deadline,
                new_tokens=max(0, event.isl - best * pool.block_size),
            )
        )
        self._timer(now + nanos(self.settings.queue.wait_max), "wait", event.id)

    def _pump(self, now: Nanos, pool: Pool) -> None:
        """Place waiting requests, best first, while a worker is not busy."""
        while (waiting := pool.queue.peek(now)) is not None:
            request = self.requests[waiting.id]
            targets, excluded = self._eligible(request, pool, now)
            if targets and self._all_busy(pool, targets):
                return
            pool.queue.remove(waiting.id)
            if not targets:
                self._nowhere(now, request, pool, excluded)
                continue
            self._place(now, request, pool, targets, excluded)

    def _place(
        self,
        now: Nanos,
        request: Request,
        pool: Pool,
        targets: list[tuple[Target, Worker]],
        excluded: list[Excluded],
    ) -> None:
        """Choose a target and send the request there."""
        event = request.event
        costs, loose = pool.costs(request, targets, now)
        choice = self._choose(request, pool, costs, now)
        if choice is None:
            text = "mode direct needs a pinned worker: send x-penstock-worker or nvext.backend_instance_id"
            self._close(now, request, pool, "rejected", "client", 400, text)
            return
        target = choice.cost.target
        worker = self.roster.workers[target.worker]
        if request.queued_since is not None:
            request.queued += now - request.queued_since
            request.queued_since = None
        request.step("dispatch")
        request.attempt += 1
        request.target = target
        request.placed = now
        request.expected_cached = choice.cost.overlap_tokens
        new_tokens = event.isl - choice.cost.overlap_tokens
        request.prefill_ahead = choice.cost.active_prefill_tokens + new_tokens
        request.legs.append(Leg(role=worker.card.role, target=target, dispatched=now))
        pool.turn += 1
        worker.requests += 1
        worker.breaker.dispatched(now)
        pool.active.place(event.id, target, prefill_tokens=new_tokens, blocks=event.blocks, loose=loose, now=now)
        pool.routed(target, event.blocks, event.text, now)
        session = event.preferences.session
        if session is not None and self.settings.affinity.mode != "off":
            pool.affinity.bind(session, target, now)
        self._tell(
            pool,
            event.id,
            "placed",
            target,
            isl=event.isl,
            cached=choice.cost.overlap_tokens,
            blocks=event.blocks,
            session=session,
        )
        decision = Decision(
            request=event.id,
            attempt=request.attempt,
            at=now,
            model=event.model,
            mode=self.settings.mode,
            chosen=target,
            because=choice.because,
            isl=event.isl,
            blocks=len(event.blocks),
            queued=seconds(request.queued),
            candidates=costs,
            excluded=excluded,
            expected_cached_tokens=choice.cost.overlap_tokens,
            temperature=self._temperature(request),
        )
        self._out.append(
            Dispatch(id=event.id, attempt=request.attempt, target=target, card=worker.card, decision=decision)
        )

    def _choose(self, request: Request, pool: Pool, costs: list[Any], now: Nanos) -> Choice | None:
        wish, mode = request.event.preferences, self.settings.mode
        if wish.worker is not None and len({cost.target.worker for cost in costs}) == 1:
            best = min(costs, key=lambda cost: cost.total)
            return pinned(best, f"pinned to {best.target} by the request")
        if mode == "direct":
            return None
        affinity = self.settings.affinity
        if wish.session is not None and affinity.mode != "off":
            home = pool.affinity.target(wish.session, now)
            if affinity.mode == "hard" and home is not None:
                for cost in costs:
                    if cost.target == home:
                        return pinned(cost, f"session {wish.session} is at home on {home}")
            if affinity.mode == "soft":
                costs[:] = [discounted(cost, home, affinity.discount) for cost in costs]
        return select(mode, costs, self._rng, temperature=self._temperature(request), turn=pool.turn)

    def _temperature(self, request: Request) -> float:
        wished = request.event.preferences.temperature
        return self.settings.cost.temperature if wished is None else wished

    def _first_token(self, now: Nanos, event: FirstToken) -> None:
        request = self._running(event.id, event.attempt, "prefill")
        if request is None:
            return
        request.step("first")
        request.first = now
        self._mark(request, first=now)
        pool = self.pools[request.event.model]
        assert request.target is not None
        pool.active.first_token(event.id, now)
        pool.fit.add(float(request.prefill_ahead), seconds(now - request.placed))
        self._tell(pool, event.id, "first", request.target)
        worker = self.roster.get(request.target.worker)
        if worker is not None:
            if worker.breaker.opened:
                self._note("breaker_closed", f"worker {worker.card.id} answers again", worker=worker.card.id)
            worker.breaker.succeeded()
        self._pump(now, pool)

    def _grown(self, now: Nanos, event: Grown) -> None:
        request = self._running(event.id, event.attempt, "streaming")
        if request is None:
            return
        request.tokens = event.tokens
        pool = self.pools[request.event.model]
        assert request.target is not None
        pool.active.grown(event.id, event.tokens // pool.block_size, now)
        self._tell(pool, event.id, "grown", request.target, tokens=event.tokens)

    def _finished(self, now: Nanos, event: Finished) -> None:
        request = self._running(event.id, event.attempt, "prefill", "streaming")
        if request is None:
            return
        if request.first is None:  # an unary answer has no earlier milestone: it proves the worker as well
            self._first_token(now, FirstToken(id=event.id, attempt=event.attempt))
        request.tokens = event.tokens
        pool = self.pools[request.event.model]
        pool.answered(request.event.isl, event.tokens, event.cached)
        self._close(now, request, pool, "ok", "none", 200, "answered in full", cached=event.cached)

    def _failed(self, now: Nanos, event: Failed) -> None:
        request = self._running(event.id, event.attempt, "prefill", "streaming")
        if request is None:
            return
        pool = self.pools[request.event.model]
        assert request.target is not None
        worker = self.roster.get(request.target.worker)
        if worker is not None:
            if event.worker_at_fault:
                worker.failures += 1
                if worker.breaker.failed(now, self.settings.breaker):
                    self._breaker_opened(now, worker, event.reason)
            else:
                worker.breaker.released()
        self._mark(request, last=now, failure=event.reason)
        request.last_failure = event.reason
        request.last_status = event.status
        again = event.retryable and request.phase == "prefill" and request.attempt < self.settings.attempts_max
        if again and now < request.deadline:
            self._release(now, request, pool)
            request.tried.append(request.target.worker)
            request.target = None
            request.step("retry")
            self._admit(now, request, pool)
            self._pump(now, pool)
            return
        if event.worker_at_fault:
            self._close(now, request, pool, "failed", "engine", event.status or 502, event.reason)
        elif event.status is not None and 400 <= event.status < 500 and event.status != 429:
            self._close(now, request, pool, "failed", "client", event.status, event.reason)
        else:
            self._close(now, request, pool, "failed", "overloaded", event.status or 503, event.reason, 1.0)

    def _cancelled(self, now: Nanos, event: Cancelled) -> None:
        request = self.requests.get(event.id)
        if request is None:
            self.dropped += 1
            return
        self._abort(request, "the client went away")
        pool = self.pools.get(request.event.model)
        self._close(now, request, pool, "cancelled", "client", 499, "the client went away")

    def _running(self, request: RequestId, attempt: int, *phases: str) -> Request | None:
        """Return an open request in one of these phases and this attempt; else count the event as dropped."""
        found = self.requests.get(request)
        if found is None or found.attempt != attempt or found.phase not in phases:
            self.dropped += 1
            return None
        return found

    def _abort(self, request: Request, reason: str) -> None:
        if request.phase in ("prefill", "streaming") and request.target is not None:
            self._out.append(Abort(id=request.id, attempt=request.attempt, target=request.target, reason=reason))
            worker = self.roster.get(request.target.worker)
            if worker is not None:
                worker.breaker.released()

    def _release(self, now: Nanos, request: Request, pool: Pool) -> None:
        """Take a request's load off its target."""
        if request.phase in ("prefill", "streaming") and request.target is not None:
            pool.active.end(request.id)
            self._tell(pool, request.id, "ended", request.target)

    def _close(
        self,
        now: Nanos,
        request: Request,
        pool: Pool | None,
        outcome: Outcome,
        fault: Fault,
        status: int,
        reason: str,
        retry_after: float | None = None,
        cached: int | None = None,
    ) -> None:
        """End a request: its load goes, its one terminal effect leaves, and waiting ones may follow."""
        event = request.event
        if pool is not None:
            self._release(now, request, pool)
            pool.queue.remove(event.id)
            pool.inflight -= 1
            pool.counts[outcome] += 1
        if request.queued_since is not None:
            request.queued += now - request.queued_since
        if request.phase in ("prefill", "streaming"):
            self._mark(request, last=now)
        request.step("close")
        del self.requests[event.id]
        self._out.append(
            Closed(
                id=event.id,
                model=event.model,
                outcome=outcome,
                fault=fault,
                status=status,
                reason=reason,
                arrived=request.arrived,
                closed=now,
                isl=event.isl,
                osl=request.tokens,
                cached=cached,
                expected_cached=request.expected_cached,
                queued=seconds(request.queued),
                first=request.first,
                attempts=request.attempt,
                legs=list(request.legs),
                retry_after=retry_after,
                session=event.preferences.session,
                program=event.preferences.program,
            )
        )
        if pool is not None and len(pool.queue):
            self._pump(now, pool)

    def _mark(self, request: Request, **changes: Any) -> None:
        request.legs[-1] = msgspec.structs.replace(request.legs[-1], **changes)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _joined(self, now: Nanos, event: WorkerJoined) -> None:
        card = event.card
        pool = self.pools.get(card.model)
        if pool is None:
            pool = self.pools[card.model] = Pool(card.model, self.settings, self._rng)
        refusal = pool.adopt(card)
        if refusal is not None:
            self._note("worker_refused", f"worker {card.id} is refused: {refusal}", worker=card.id)
            return
        known = self.roster.get(card.id)
        if known is not None and card.epoch > known.card.epoch:
            self._gone(now, known, f"came back with epoch {card.epoch}")
        worker = self.roster.join(card, event.ready, now)
        if worker is None:
            self._pump(now, pool)
            return
        if pool.exact is not None:
            for target in worker.targets[: len(card.events)]:
                pool.streams[target] = KvStream()
        self._note(
            "worker_joined",
            f"worker {card.id} serves {card.model} at {card.url}"
            + ("" if card.events or not pool.indexed else "; it announces no KV events, so its cache is guessed"),
            worker=card.id,
        )
        self._pump(now, pool)

    def _ready(self, now: Nanos, event: WorkerReady) -> None:
        if self.roster.move(event.worker, event.epoch, "ready", now):
            self._pump(now, self.pools[self.roster.workers[event.worker].card.model])

    def _draining(self, now: Nanos, event: WorkerDraining) -> None:
        if self.roster.move(event.worker, event.epoch, "drain", now):
            self._note("worker_draining", f"worker {event.worker} takes no new requests", worker=event.worker)

    def _left(self, now: Nanos, event: WorkerLeft) -> None:
        worker = self.roster.get(event.worker)
        if worker is None or worker.card.epoch != event.epoch:
            self.roster.stale += 1
            return
        self._gone(now, worker, event.reason)

    def _gone(self, now: Nanos, worker: Worker, reason: str) -> None:
        card = worker.card
        self.roster.leave(card.id, card.epoch)
        pool = self.pools[card.model]
        pool.drop(worker)
        self._replays = {i: t for i, t in self._replays.items() if t.worker != card.id}
        self._note("worker_left", f"worker {card.id} is gone: {reason}", worker=card.id)
        self._pump(now, pool)

    def _cordoned(self, now: Nanos, event: WorkerCordoned) -> None:
        worker = self.roster.get(event.worker)
        if worker is None:
            self.dropped += 1
            return
        if event.on and event.reason not in worker.cordons:
            worker.cordons.append(event.reason)
            self._note("worker_cordoned", f"worker {event.worker}: {event.reason}", worker=event.worker)
        elif not event.on and event.reason in worker.cordons:
            worker.cordons.remove(event.reason)
            self._pump(now, self.pools[worker.card.model])

    def _measured(self, now: Nanos, event: WorkerMeasured) -> None:
        worker = self.roster.get(event.worker)
        if worker is None:
            self.dropped += 1
            return
        worker.speed = (event.prefill_intercept, event.prefill_slope, event.decode_base, event.decode_slope)

    def _breaker_opened(self, now: Nanos, worker: Worker, reason: str) -> None:
        until = worker.breaker.until
        assert until is not None
        self._note(
            "breaker_opened",
            f"worker {worker.card.id} takes no requests for {seconds(until - now):.1f} s: "
            f"{worker.breaker.failures} failures in a row, the last: {reason}",
            worker=worker.card.id,
        )
        self._timer(until, "kick", worker.card.model)

    # --- caches -----------------------------------------------------------------------------------------------------

    def _kv_observed(self, now: Nanos, event: KvObserved) -> None:
        stream, pool = self._stream(Target(event.worker, event.rank), event.epoch)
        if stream is not None and pool is not None:
            self._apply(pool, Target(event.worker, event.rank), stream.observe(event))

    def _replay_ended(self, now: Nanos, event: ReplayEnded) -> None:
        target = self._replays.pop(event.id, None)
        stream, pool = (None, None) if target is None else self._stream(target, None)
        if target is None or stream is None or pool is None:
            self.dropped += 1
            return
        self._apply(pool, target, stream.replayed(event))

    def _kv_lost(self, now: Nanos, event: KvSourceLost) -> None:
        target = Target(event.worker, event.rank)
        stream, pool = self._stream(target, None)
        if stream is not None and pool is not None:
            self._apply(pool, target, stream.lost(event.reason))

    def _stream(self, target: Target, epoch: int | None) -> tuple[KvStream | None, Pool | None]:
        """Return a target's event stream and its pool; count what comes from a worker or epoch that is not there."""
        worker = self.roster.get(target.worker)
        if worker is None or (epoch is not None and worker.card.epoch != epoch):
            self.dropped += 1
            return None, None
        pool = self.pools[worker.card.model]
        return pool.streams.get(target), pool

    def _apply(self, pool: Pool, target: Target, outcome: StreamOutcome) -> None:
        """Carry a stream's verdict into the index, in order, and ask for what is missing."""
        assert pool.exact is not None
        if outcome.clear:
            pool.exact.clear(target)
        for event in outcome.events:
            pool.exact.apply(target, event)
        if outcome.replay_from is not None:
            self._replay_id += 1
            self._replays[self._replay_id] = target
            self._out.append(
                ReplayWanted(id=self._replay_id, worker=target.worker, rank=target.rank, first=outcome.replay_from)
            )
        if outcome.note is not None:
            self._note("kv_stream", f"worker {target}: {outcome.note}", worker=target.worker)

    # --- other routers ----------------------------------------------------------------------------------------------

    def _peer_update(self, now: Nanos, event: PeerUpdate) -> None:
        placement = event.placement
        pool = self.pools.get(placement.model)
        if pool is None:
            self.dropped += 1
            return
        if placement.step == "placed":
            loose = max(0, -(-placement.isl // pool.block_size) - len(placement.blocks))
            pool.active.place(
                placement.id,
                placement.target,
                prefill_tokens=placement.isl - placement.cached,
                blocks=placement.blocks,
                loose=loose,
                now=now,
                router=event.router,
            )
            pool.routed(placement.target, placement.blocks, False, now)
            if placement.session is not None and self.settings.affinity.mode != "off":
                pool.affinity.bind(placement.session, placement.target, now)
            self._timer(now + nanos(self.settings.stale_after), "sweep", placement.model)
        elif placement.step == "first":
            pool.active.first_token(placement.id, now, event.router)
        elif placement.step == "grown":
            pool.active.grown(placement.id, placement.tokens // pool.block_size, now, event.router)
        else:
            pool.active.end(placement.id, event.router)
        self._pump(now, pool)

    def _peer_gone(self, now: Nanos, event: PeerGone) -> None:
        for pool in self.pools.values():
            pool.active.drop_router(event.router)
            self._pump(now, pool)

    def _tell(self, pool: Pool, request: RequestId, step: Any, target: Target, **more: Any) -> None:
        if self.shared:
            placement = Placement(step=step, id=request, model=pool.model, target=target, **more)
            self._out.append(Publish(placement=placement))

    # --- time -------------------------------------------------------------------------------------------------------

    def _timer(self, at: Nanos, kind: Timer, key: str) -> None:
        heapq.heappush(self._timers, (at, kind, key))
        if len(self._timers) > 256 and len(self._timers) > 4 * len(self.requests):
            # The deadlines of ended requests would stay for as long as deadlines are.
            self._timers = [t for t in self._timers if t[1] in ("kick", "sweep") or t[2] in self.requests]
            heapq.heapify(self._timers)

    def _arm(self) -> None:
        """Ask for a wake where the earliest timer is not the one that is armed."""
        head = self._timers[0][0] if self._timers else None
        if head is not None and (self._armed is None or head < self._armed):
            self._armed = head
            self._out.append(Wake(at=head))

    def _woken(self, now: Nanos, event: Woken) -> None:
        self._armed = None
        while self._timers and self._timers[0][0] <= now:
            _, kind, key = heapq.heappop(self._timers)
            if kind == "kick":
                self._pump(now, self.pools[key])
            elif kind == "sweep":
                if self.pools[key].active.expire(now - nanos(self.settings.stale_after)):
                    self._pump(now, self.pools[key])
            else:
                self._overdue(now, kind, RequestId(key))

    def _overdue(self, now: Nanos, kind: Timer, key: RequestId) -> None:
        request = self.requests.get(key)
        if request is None:
            return
        pool = self.pools[request.event.model]
        if kind == "wait":
            limit = nanos(self.settings.queue.wait_max)
            if request.phase == "queued" and request.queued_since is not None and now >= request.queued_since + limit:
                text = f"waited {self.settings.queue.wait_max:g} s for a worker of {pool.model}"
                self._close(now, request, pool, "rejected", "overloaded", 503, text, 1.0)
        elif now >= request.deadline:
            waited = seconds(now - request.arrived)
            self._abort(request, "its deadline has passed")
            self._close(now, request, pool, "expired", "deadline", 504, f"not done within {waited:.3g} s")

    def _note(self, kind: str, text: str, **fields: Any) -> None:
        self._out.append(Noted(kind=kind, text=text, fields=fields))

    # --- what others read -------------------------------------------------------------------------------------------

    def status(self, now: Nanos) -> dict[str, Any]:
        """Return what ``penstock status``, the page and the metrics show: plain data, measured now."""
        return router_status(self, now)

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        state, internal, gauss = self._rng.getstate()
        return {
            "version": SNAPSHOT_VERSION,
            "name": self.name,
            "rng": [state, list(internal), gauss],
            "roster": self.roster.snapshot(),
            "pools": {model: pool.snapshot() for model, pool in self.pools.items()},
            "requests": [msgspec.to_builtins(request) for request in self.requests.values()],
            "timers": [list(timer) for timer in sorted(self._timers)],
            "armed": self._armed,
            "replays": [[i, list(target)] for i, target in self._replays.items()],
            "replay_id": self._replay_id,
            "dropped": self.dropped,
        }

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise InvariantError(f"a router snapshot of version {snapshot['version']}, not {SNAPSHOT_VERSION}")
        state, internal, gauss = snapshot["rng"]
        self._rng.setstate((state, tuple(internal), gauss))
        self.name = snapshot["name"]
        self.roster.restore(snapshot["roster"])
        self.pools = {}
        for model, saved in snapshot["pools"].items():
            pool = self.pools[model] = Pool(model, self.settings, self._rng)
            pool.restore(saved)
        requests = [msgspec.convert(raw, Request) for raw in snapshot["requests"]]
        self.requests = {request.id: request for request in requests}
        self._timers = [(at, kind, key) for at, kind, key in snapshot["timers"]]
        self._armed = snapshot["armed"]
        self._replays = {i: Target(*target) for i, target in snapshot["replays"]}
        self._replay_id = snapshot["replay_id"]
        self.dropped = snapshot["dropped"]

    def check(self) -> None:
        self.roster.check()
        for model, pool in self.pools.items():
            pool.check()
            mine = [r for r in self.requests.values() if r.event.model == model]
            if len(mine) != pool.inflight:
                raise InvariantError(f"{model}: {len(mine)} open requests, {pool.inflight} counted")
            placed = {r.id for r in mine if r.phase in ("prefill", "streaming")}
            if placed != pool.active.own():
                raise InvariantError(f"{model}: requests on workers and active sequences differ")
            for request in mine:
                if (request.phase == "queued") != (request.id in pool.queue):
                    raise InvariantError(f"request {request.id} is {request.phase}, the queue says otherwise")
        for request in self.requests.values():
            if request.phase in ("arrived", "done"):
                raise InvariantError(f"request {request.id} was left in phase {request.phase}")
