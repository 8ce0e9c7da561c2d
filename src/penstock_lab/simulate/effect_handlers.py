"""Effect handlers of the simulated cluster: carry out the effects of router and engines, and keep the books.

They do what the live processes do, but with no network and no HTTP: what the router wants goes to an engine at the
same moment, and what an engine reports goes back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.fleet.events import RequestsLeft
from penstock.kernel.errors import InvariantError
from penstock.kernel.hashing import MediaSpan
from penstock.kernel.machine import SECOND, Effect, Event, Nanos, nanos, seconds
from penstock.kernel.request_record import ItlSummary, RequestRecord
from penstock.kernel.simulation import Answer
from penstock.kernel.values import MediaItem, Prompt, RequestId, WorkerId
from penstock.router import events as routing
from penstock.router.requests.request_close import record_of
from penstock.router.router import Router
from penstock.router.stage_graph import AT_ONCE, FINAL
from penstock_lab.engine import events as engine
from penstock_lab.engine.network_links import Transferred
from penstock_lab.runs.block_runs import Chain
from penstock_lab.simulate.kv_transfers import KvTransfers, leg_of
from penstock_lab.simulate.observer import Observer
from penstock_lab.simulate.prefix_tree import PrefixTree
from penstock_lab.simulate.simulated_fleet import SimulatedFleet, SimulatedWorker
from penstock_lab.simulate.simulation_plan import SimulationPlan
from penstock_lab.traffic.sessions import Sessions
from penstock_lab.traffic.traffic_request import TrafficMedia, TrafficRequest

ROUTER = "router"
FLEET = "fleet"
TIER_REPORT: Nanos = SECOND // 10
"""Between two reports of the tiers' costs, where requests arrive: what a router knows is no older than that. Live it is
`engine_stats.interval`; here a report costs no message, only the time of the simulation."""
_PLAIN = routing.Preferences()


@dataclass(slots=True)
class OpenRequest:
    """A request between its arrival and its end."""

    request: TrafficRequest
    blocks: Sequence[int]
    sources: dict[str, int] | None = None
    """tier -> prompt tokens that were loaded from it; None where its worker has no tiers."""
    got: int = 0
    """Output tokens of the legs that are over."""
    first: Nanos | None = None
    last: Nanos | None = None
    """When the first and the last output token came."""


class EffectHandlers:
    """Carry out effects, and know every open request.

    Args:
        record: takes every request that has ended, in that order.
        decided: takes every decision of the router.
        idle: called when the last open request has ended.
        loop: gives the turn of a session that follows one that has ended; None where turns come by themselves.
        later: calls something at a moment; ``post``: lets an event reach a machine then.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        router: Router,
        fleet: SimulatedFleet,
        *,
        record: Callable[[RequestRecord], object],
        decided: Callable[[routing.Decision], object],
        idle: Callable[[], object],
        loop: Sessions | None,
        later: Callable[[Nanos, Callable[[], object]], object],
        post: Callable[[Nanos, str, Event], object],
    ) -> None:
        self.submitted = 0
        self.closed = 0
        self.preemptions = 0
        self.end: Nanos = 0
        """When the last request ended."""
        self.open: dict[RequestId, OpenRequest] = {}
        self.lookers: list[Observer] = []
        """Observers, which count what arrives and ends."""
        self.notes: dict[str, int] = {}
        """How often each kind of note was taken."""
        self._plan = plan
        self._single_blocks = plan.single_blocks
        self._router = router
        self._fleet = fleet
        self._record = record
        self._decided = decided
        self._idle = idle
        self._loop = loop
        self._later = later
        self._post = post
        self.handoffs = KvTransfers(fleet)
        self.embeddings: set[str] = set()
        """Media in the store that encode workers write. It is not bounded: the router's own table is."""
        self._encoding: dict[str, list[str]] = {}
        """Leg of an encode worker -> the media that it encodes."""
        self._tiered = any(pool.cache.host for pool in plan.pools.values())
        self._reports_due: Nanos = 0
        self._names = PrefixTree(plan.block_size)
        self._made = 0
        """Output tokens that engines made and did not take back..."""
        self._had = 0
        """... and those that requests have had."""
        self._carriers: dict[type[Effect], Callable[[Nanos, str, Any], Iterable[Answer]]] = {
            routing.Dispatch: self._dispatched,
            routing.Abort: self._aborted,
            routing.Closed: self._ended,
            routing.OperatorNote: self._noted,
            routing.ReplayWanted: self._replay_wanted,
            engine.EngineStarted: _answer_nothing,
            engine.EngineFirstToken: self._first_token,
            engine.EngineFinished: self._finished,
            engine.EngineRejected: self._rejected,
            engine.KvChanged: self._kv_changed,
            engine.PullKv: self._pull,
            Transferred: self._transferred,
            routing.Release: self._released,
            routing.AdapterChange: self._adapters_changed,
        }

    def carry(self, kind: type[Effect], carrier: Callable[[Nanos, str, Any], Iterable[Answer]]) -> None:
        """Let another carrier carry out effects of a kind."""
        self._carriers[kind] = carrier

    def __call__(self, now: Nanos, sender: str, effect: Effect) -> Iterable[Answer]:
        return self._carriers[type(effect)](now, sender, effect)

    def arrived(self, request: TrafficRequest) -> routing.Arrived:
        """Open a request."""
        id = RequestId(f"r{self.submitted}")
        self.submitted += 1
        blocks: Sequence[int] = self._names.blocks(request)
        if self._single_blocks:
            blocks = list(blocks)
        self.open[id] = OpenRequest(request, blocks)
        for looker in self.lookers:
            looker.counts.arrive(request.isl)
        return routing.Arrived(
            id=id,
            model=self._plan.model,
            prompt=Prompt(request.isl, blocks),
            media=tuple([MediaItem(item.id, item.tokens) for item in request.media]) if request.media else (),
            preferences=_PLAIN
            if request.session is None and not self._plan.slo.classes
            else routing.Preferences(session=request.session, program=request.program, service_class=request.kind),
            tenant=request.tenant,
            adapter=request.adapter,
        )

    def tier_reports(self, at: Nanos) -> Sequence[Event]:
        """Return what the router has to hear of the tiers before a request that arrives at a moment."""
        if not self._tiered or at < self._reports_due:
            return ()
        self._reports_due = at + TIER_REPORT
        return [
            routing.TiersMeasured(worker=worker.id, costs=worker.engine.tiers.costs(at))
            for worker in self._fleet.workers.values()
            if worker.engine.tiers is not None
        ]

    def broken(self, worker: SimulatedWorker, now: Nanos, why: str) -> list[Event]:
        """Everything that a worker runs breaks off: return the events for the router."""
        failures: list[Event] = []
        for key, id in worker.running.items():
            opened = self.open.get(id)
            if opened is None:
                continue
            if key in worker.stages:
                failures.append(routing.Failed(id=id, attempt=_attempt(key), reason=why, retryable=True))
                continue
            # Before the first token came, nothing is out, even where it would come at this very moment.
            known = opened.first is not None and key not in worker.awaiting
            out = worker.engine.tokens_at(key, now) if known else 0
            opened.got += out
            self._made += out
            resume = None
            if opened.got:
                # The trace has no names for a request's own output: only the prompt can be found in a cache again.
                isl = opened.request.isl + opened.got
                resume = routing.Resume(prompt=Prompt(isl, opened.blocks), tokens=opened.got)
            failures.append(
                routing.Failed(id=id, attempt=_attempt(key), reason=why, retryable=not opened.got, resume=resume)
            )
        worker.running.clear()
        worker.stages.clear()
        worker.awaiting.clear()
        return failures

    def cut_off(self, worker: SimulatedWorker, now: Nanos) -> list[Answer]:
        """A worker is about to be gone: return events for workers that wait for its KV, or hold some for it."""
        found: list[Answer] = []
        # A worker that writes to it, or has met it, finds out; one that waits to be asked does not.
        known = self._fleet.plan.pools[worker.pool].handoff in AT_ONCE
        for key in list(worker.running):
            found += self.handoffs.given_up(now, key, release=known)
        for leg in self.handoffs.of(worker):
            found += self.handoffs.lost(now, leg)
        worker.kv_retained.clear()
        return found

    # --- what becomes of effects -------------------------------------------------------------------------------------

    def _dispatched(self, now: Nanos, sender: str, effect: routing.Dispatch) -> Iterable[Answer]:
        self._decided(effect.decision)
        worker = self._fleet.workers.get(effect.target.worker)
        if worker is None or worker.card.epoch != effect.card.epoch:
            gone = "connection refused: it is gone"
            failed = routing.Failed(id=effect.id, attempt=effect.attempt, reason=gone, retryable=True, received=False)
            return ((now, ROUTER, failed),)
        opened = self.open[effect.id]
        key = f"{effect.id}.{effect.attempt}"
        worker.running[key] = effect.id
        isl, leg, last = opened.request.isl + opened.got, leg_of(effect), effect.stage in FINAL
        if not last:
            worker.stages.add(key)
        if leg is not None and effect.stage == "prefill":
            self.handoffs.makes(leg, worker, key)
        elif leg is not None and last:
            self.handoffs.takes(leg, worker, key)
        media = opened.request.media
        if effect.stage == "encode":
            return ((now, worker.id, self._encode(key, effect, media)),)
        submit = engine.SubmitRequest(
            id=RequestId(key),
            prompt=Prompt(isl, opened.blocks),
            max_tokens=opened.request.osl - opened.got if last else 1,
            hold=effect.stage == "prefill",
            remote=isl if leg is not None and last else 0,
            media=[MediaSpan(item.id, item.start, item.tokens) for item in media] if media else [],
            embedded=[item.id for item in media if item.id in self.embeddings] if media else [],
            next_in=effect.prefetch_after,
        )
        adapter, pool = opened.request.adapter, self._plan.pools[worker.pool]
        # One whose KV is brought has its first token already.
        seen = now if submit.remote else now + nanos(pool.sim.request_overhead)
        if adapter is not None and pool.adapter_slots:
            ready = worker.adapters.get(adapter)
            if ready is None:
                raise InvariantError(f"request {effect.id} was sent to {worker.id}, which has no adapter {adapter}")
            seen = max(seen, ready)
        if seen > now:
            worker.awaiting.add(key)
            self._later(seen, partial(self._admitted, seen, worker, submit))
            return ()
        return ((now, worker.id, submit),)

    def _adapters_changed(self, now: Nanos, sender: str, effect: routing.AdapterChange) -> Iterable[Answer]:
        """An engine unloads adapters, which takes no time, and loads one, after those that it loads already."""
        worker = self._fleet.workers.get(effect.card.id)
        if worker is None or worker.card.incarnation != effect.card.incarnation:
            return ()
        for unwanted in effect.unload:
            worker.adapters.pop(unwanted, None)
        name, took = effect.load, self._plan.pools[worker.pool].sim.adapter_load
        if name is None:
            return ()
        if name not in worker.adapters:
            worker.adapters[name] = worker.adapters_loaded = max(now, worker.adapters_loaded) + nanos(took)
        loaded = routing.AdapterLoaded(worker=worker.id, epoch=worker.card.incarnation, adapter=name, seconds=took)
        return ((max(now, worker.adapters[name]), ROUTER, loaded),)

    def _admitted(self, now: Nanos, worker: SimulatedWorker, submit: engine.SubmitRequest) -> None:
        """Send a request that was on its way in, or waited for its adapter, unless it has ended meanwhile."""
        if submit.id in worker.awaiting:
            worker.awaiting.discard(submit.id)
            self._post(now, worker.id, submit)

    def _encode(self, key: str, effect: routing.Dispatch, media: Sequence[TrafficMedia]) -> engine.SubmitRequest:
        """Return what an encode worker is asked: its media and nothing else."""
        spans: list[MediaSpan] = []
        start = 0
        for place in effect.encode:
            spans.append(MediaSpan(media[place].id, start, media[place].tokens))
            start += media[place].tokens
        self._encoding[key] = [span.id for span in spans]
        return engine.SubmitRequest(id=RequestId(key), prompt=Prompt(start, ()), max_tokens=1, media=spans, encode=True)

    def _pull(self, now: Nanos, sender: str, effect: engine.PullKv) -> Iterable[Answer]:
        return self.handoffs.start_fetch(now, effect)

    def _transferred(self, now: Nanos, sender: str, effect: Transferred) -> Iterable[Answer]:
        return [*self.handoffs.arrived(now, effect), *self._drained(now)]

    def _released(self, now: Nanos, sender: str, effect: routing.Release) -> Iterable[Answer]:
        return [*self.handoffs.unwanted(now, (effect.id, effect.attempt)), *self._drained(now)]

    def _drained(self, now: Nanos) -> list[Answer]:
        """Tell the fleet of the workers that were drained and from which everything has been fetched."""
        over = [worker for worker in self._fleet.workers.values() if worker.state == "draining" and worker.idle]
        return [(now, FLEET, idle(worker)) for worker in over]

    def _aborted(self, now: Nanos, sender: str, effect: routing.Abort) -> Iterable[Answer]:
        key = f"{effect.id}.{effect.attempt}"
        worker = self._fleet.workers.get(effect.target.worker)
        if worker is None or worker.running.pop(key, None) is None:
            return ()
        if key in worker.awaiting:
            worker.awaiting.discard(key)
            return self._leg_ended(now, worker, key, effect.id)
        stop = engine.AbortRequest(id=RequestId(key))
        return ((now, worker.id, stop), *self._leg_ended(now, worker, key, effect.id))

    def _leg_ended(self, now: Nanos, worker: SimulatedWorker, key: str, id: RequestId) -> Iterable[Answer]:
        """A leg has ended without what it was for: its part in a hand-off is over, too."""
        self._encoding.pop(key, None)
        if key in worker.stages:
            worker.stages.discard(key)
            return self.handoffs.lost(now, (id, _attempt(key)))
        return self.handoffs.given_up(now, key, release=True)

    def _first_token(self, now: Nanos, sender: str, effect: engine.EngineFirstToken) -> Iterable[Answer]:
        worker = self._fleet.workers[WorkerId(sender)]
        id = None if effect.id in worker.stages else worker.running.get(effect.id)
        opened = None if id is None else self.open.get(id)
        if id is None or opened is None:
            return ()
        if opened.first is None:
            opened.first = effect.at
        return ((effect.at, ROUTER, routing.FirstToken(id=id, attempt=_attempt(effect.id))),)

    def _finished(self, now: Nanos, sender: str, effect: engine.EngineFinished) -> Iterable[Answer]:
        worker = self._fleet.workers[WorkerId(sender)]
        id = worker.running.pop(effect.id, None)
        answers: list[Answer] = []
        if effect.id in worker.stages:
            worker.stages.discard(effect.id)
            if id is not None and effect.reason != "abort":
                answers += self._staged(id, effect)
        elif id is not None and effect.reason != "abort":
            opened = self.open[id]
            opened.got += effect.tokens
            opened.last = effect.at
            if worker.engine.tiers is not None:
                opened.sources = effect.sources
            self._made += effect.tokens
            done = routing.Finished(id=id, attempt=_attempt(effect.id), tokens=opened.got, cached=effect.cached)
            answers.append((effect.at, ROUTER, done))
        self.preemptions += effect.preemptions
        if worker.state == "draining" and worker.idle:
            answers.append((now, FLEET, idle(worker)))
        return answers

    def _staged(self, id: RequestId, effect: engine.EngineFinished) -> list[Answer]:
        """A stage before a request's last one is done."""
        attempt = _attempt(effect.id)
        self.embeddings.update(self._encoding.pop(effect.id, ()))
        done = routing.Staged(id=id, attempt=attempt, kv_retained=effect.blocks_retained > 0, cached=effect.cached)
        freed = self.handoffs.prefilled(effect.at, (id, attempt)) if effect.blocks_retained else ()
        # Where the request has ended meanwhile, its KV is only let go.
        return [*freed, *([(effect.at, ROUTER, done)] if id in self.open else [])]

    def _rejected(self, now: Nanos, sender: str, effect: engine.EngineRejected) -> Iterable[Answer]:
        worker, key = self._fleet.workers[WorkerId(sender)], effect.id
        id = worker.running.pop(key, None)
        if id is None:
            return ()
        attempt = _attempt(key)
        failed = routing.Failed(
            id=id, attempt=attempt, reason=effect.why, retryable=False, worker_at_fault=False, status=400
        )
        return ((effect.at, ROUTER, failed), *self._leg_ended(now, worker, key, id))

    def _kv_changed(self, now: Nanos, sender: str, effect: engine.KvChanged) -> Iterable[Answer]:
        worker = self._fleet.workers.get(WorkerId(sender))
        pool = self._router.pools.get(self._plan.model)
        if worker is None or pool is None or pool.index.exact is None:
            return ()  # no listener: without a weight on overlap no index is kept
        batch = routing.KvObserved(
            worker=worker.id, rank=0, epoch=worker.card.incarnation, sequence=worker.sequence, events=effect.events
        )
        worker.sequence += 1
        return ((now, ROUTER, batch),)

    def _replay_wanted(self, now: Nanos, sender: str, effect: routing.ReplayWanted) -> Iterable[Answer]:
        raise InvariantError(f"the router misses KV events of {effect.worker}, although none can be lost here")

    def _noted(self, now: Nanos, sender: str, effect: routing.OperatorNote) -> Iterable[Answer]:
        self.notes[effect.kind] = self.notes.get(effect.kind, 0) + 1
        return ()

    def _ended(self, now: Nanos, sender: str, closed: routing.Closed) -> Iterable[Answer]:
        opened = self.open.pop(closed.id)
        self.closed += 1
        self.end = max(self.end, closed.closed)
        record = _record(closed, opened)
        self._had += opened.got
        for looker in self.lookers:
            looker.counts.end(record, self._plan.slo)
        self._record(record)
        session = opened.request.session
        following = None if self._loop is None or session is None else self._loop.next(session, seconds(now))
        until = self._plan.until
        if following is None or (until is not None and following.at >= until):
            if not self.open:
                self._idle()
            return ()
        at = nanos(following.at)
        return [(at, ROUTER, event) for event in (*self.tier_reports(at), self.arrived(following))]

    def check(self) -> None:
        """Compare the books of a run that is over with each other.

        Raises:
            InvariantError: requests, tokens or blocks went missing.
        """
        if self.open or self.closed != self.submitted:
            raise InvariantError(
                f"{self.submitted} requests arrived and {self.closed} ended, {len(self.open)} are open"
            )
        if self._had != self._made:
            raise InvariantError(f"engines made {self._made} tokens, requests had {self._had}")
        if self.handoffs.open:
            raise InvariantError(f"{self.handoffs.open} hand-offs are not over, although all requests are")
        for worker in self._fleet.workers.values():
            worker.engine.check()
            if (
                worker.running
                or worker.kv_retained
                or worker.awaiting
                or worker.engine.running
                or worker.engine.kv_usage
            ):
                raise InvariantError(f"worker {worker.id} holds blocks of requests that have ended")


def _record(closed: routing.Closed, opened: OpenRequest) -> RequestRecord:
    first, last, tokens = opened.first, opened.last, opened.got
    gaps = tokens - 1
    itl = None
    if first is not None and last is not None and gaps > 0:
        itl = ItlSummary(gaps=gaps, mean=(last - first) / gaps / SECOND)
    arrived = closed.arrived
    return record_of(
        closed,
        blocks=opened.blocks.ranges() if isinstance(opened.blocks, Chain) else opened.blocks,
        itl=itl,
        ttft=None if first is None else (first - arrived) / SECOND,
        e2e=None if last is None else (last - arrived) / SECOND,
        service_class=opened.request.kind,
        osl_requested=opened.request.osl,
        turn=opened.request.turn if opened.request.session is not None else None,
        cached_by_tier=opened.sources,
        tenant=opened.request.tenant,
    )


def idle(worker: SimulatedWorker) -> RequestsLeft:
    """Return what the fleet is told of a draining worker that has nothing to do any more."""
    return RequestsLeft(worker=worker.id, serial=worker.counted, active=0)


def _attempt(key: str) -> int:
    """Return the attempt of an engine's id of a request."""
    return int(key.rpartition(".")[2])


def _answer_nothing(now: Nanos, sender: str, effect: Effect) -> Iterable[Answer]:
    return ()
