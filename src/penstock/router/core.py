"""What do all parts of the router share? The state of the machine, its outgoing effects and its timers.

`Core` holds state and the few moves that every part needs; what events mean stands in `placing`, `lifecycle`,
`members`, `caches` and `sync`, as functions over a core.
"""

import heapq
import random
from typing import Any, Literal

import msgspec

from penstock.kernel.machine import Effect, Nanos, Wake, seconds
from penstock.kernel.values import RequestId, Target
from penstock.router.events import Abort, Closed, Fault, Noted, Outcome, Placement, Publish
from penstock.router.holding import abandon
from penstock.router.pool import Pool
from penstock.router.request import HEDGE, STAGE, Request
from penstock.router.roster import Roster
from penstock.router.settings import RouterSettings

Timer = Literal["deadline", "wait", "hedge", "kick", "sweep"]


class Core:
    """The router's state: roster, one `Pool` per model, open requests, timers."""

    def __init__(self, settings: RouterSettings, *, name: str, seed: int, shared: bool, runs: bool = False) -> None:
        self.settings = settings
        self.started = settings
        """As of the start: they decide which index a pool keeps, whatever is changed later."""
        self.name = name
        self.shared = shared
        self.runs = runs
        """Prompts come as `penstock.kernel.runs.Chain`, as in a simulation."""
        self.rng = random.Random(seed)
        self.roster = Roster()
        self.pools: dict[str, Pool] = {}
        self.requests: dict[RequestId, Request] = {}
        self.dropped = 0
        """Events about requests, attempts, workers or replays that are not, or no longer, known."""
        self.replays: dict[int, Target] = {}
        self.replay_id = 0
        self.stranded: dict[RequestId, None] = {}
        """Requests whose worker was lost in the middle and for which no other is there yet."""
        self.freed: dict[str, None] = {}
        """Models whose waiting requests should be looked at once the present event has been handled."""
        self.out: list[Effect] = []
        self.timers: list[tuple[Nanos, Timer, str]] = []
        self.armed: Nanos | None = None

    def make_pool(self, model: str) -> Pool:
        """Keep state for a model from now on."""
        pool = self.pools[model] = Pool(model, self.started, self.rng, self.runs)
        if self.settings is not self.started:
            pool.use(self.settings)
        return pool

    # --- effects ----------------------------------------------------------------------------------------------------

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Say something to the operator."""
        self.out.append(Noted(kind=kind, text=text, fields=fields))

    def tell(self, pool: Pool, request: RequestId, step: Any, target: Target, **more: Any) -> None:
        """Say something to the other routers, where there may be any."""
        if self.shared:
            self.out.append(
                Publish(placement=Placement(step=step, id=request, model=pool.model, target=target, **more))
            )

    def waiting(self, model: str) -> int:
        """Return how many requests of a model wait for a worker, those included for which there is none."""
        pool = self.pools.get(model)
        stranded = sum(self.requests[id].event.model == model for id in self.stranded)
        return stranded + (0 if pool is None else len(pool.queue))

    # --- moves of a request -----------------------------------------------------------------------------------------

    def mark(self, request: Request, **changes: Any) -> None:
        """Write something down about its present leg."""
        request.legs[-1] = msgspec.structs.replace(request.legs[-1], **changes)

    def mark_leg(self, request: Request, leg: int, **changes: Any) -> None:
        """Write something down about one of its legs."""
        request.legs[leg] = msgspec.structs.replace(request.legs[leg], **changes)

    def abort(self, request: Request, reason: str) -> None:
        """Stop what runs for its answer on a worker; that says nothing about the worker."""
        if request.on_worker and request.target is not None:
            running = [(request.current, request.target)]
            if request.hedge is not None:
                running.append((request.hedge.attempt, request.hedge.target))
            for attempt, target in running:
                self.out.append(Abort(id=request.id, attempt=attempt, target=target, reason=reason))
                worker = self.roster.get(target.worker)
                if worker is not None:
                    worker.breaker.released()

    def load(
        self, request: Request, pool: Pool, target: Target, *, cached: int, loose: int, now: Nanos, owner: str = ""
    ) -> None:
        """Count a request's prompt as load of a target, and tell the other routers unless it is only a hedge."""
        event = request.event
        new = event.isl - cached
        pool.active.place(event.id, target, prefill_tokens=new, blocks=event.blocks, loose=loose, now=now, router=owner)
        if owner != HEDGE:
            session = None if owner else event.preferences.session
            name = self.leg_id(event.id) if owner else event.id
            self.tell(pool, name, "placed", target, isl=event.isl, cached=cached, blocks=event.blocks, session=session)

    def leg_id(self, request: RequestId) -> RequestId:
        """Return the name under which other routers hear of a stage before a request's last one."""
        return RequestId(request + STAGE)

    def unstage(self, request: Request, pool: Pool) -> None:
        """A stage before the last is over in every way: its load goes."""
        remote = request.remote
        if remote is not None:
            request.remote = None
            pool.active.end(request.id, STAGE)
            self.tell(pool, self.leg_id(request.id), "ended", remote.target)
            self.freed[pool.model] = None

    def release(self, request: Request, pool: Pool) -> None:
        """Take its load off its target."""
        if request.on_worker and request.target is not None:
            pool.active.end(request.id)
            if request.hedge is not None:
                pool.active.end(request.id, HEDGE)
                request.hedge = None
            self.tell(pool, request.id, "ended", request.target)
            self.freed[pool.model] = None

    def close(
        self,
        now: Nanos,
        request: Request,
        outcome: Outcome,
        fault: Fault,
        status: int,
        reason: str,
        *,
        retry_after: float | None = None,
        cached: int | None = None,
    ) -> None:
        """End a request: its load goes and its one terminal effect leaves."""
        event = request.event
        pool = self.pools.get(event.model)
        if pool is not None and request.counted:
            abandon(self, request, pool)
            self.release(request, pool)
            pool.queue.remove(event.id)
            pool.inflight -= 1
            pool.counts[outcome] += 1
        self.stranded.pop(event.id, None)
        request.leave_queue(now)
        if request.on_worker:
            self.mark(request, last=now)
        request.step("close")
        del self.requests[event.id]
        self.out.append(
            Closed(
                id=event.id,
                model=event.model,
                outcome=outcome,
                fault=fault,
                status=status,
                reason=reason,
                arrived=request.arrived,
                closed=now,
                isl=request.isl,
                osl=request.tokens,
                cached=cached,
                expected_cached=request.expected_cached,
                queued=seconds(request.queued),
                first=request.first,
                attempts=request.attempt - request.staged,
                migrations=request.migrations,
                legs=list(request.legs),
                retry_after=retry_after,
                session=event.preferences.session,
                program=event.preferences.program,
            )
        )

    # --- time -------------------------------------------------------------------------------------------------------

    def timer(self, at: Nanos, kind: Timer, key: str) -> None:
        """Look at something again at ``at``; timers are never cancelled, they find nothing to do instead."""
        heapq.heappush(self.timers, (at, kind, key))
        if len(self.timers) > 256 and len(self.timers) > 4 * len(self.requests):
            # The deadlines of ended requests would stay for as long as deadlines are.
            self.timers = [t for t in self.timers if t[1] in ("kick", "sweep") or t[2] in self.requests]
            heapq.heapify(self.timers)

    def due(self, now: Nanos) -> list[tuple[Timer, str]]:
        """Take out what is due, earliest first."""
        self.armed = None
        found: list[tuple[Timer, str]] = []
        while self.timers and self.timers[0][0] <= now:
            _, kind, key = heapq.heappop(self.timers)
            found.append((kind, key))
        return found

    def arm(self) -> None:
        """Ask for a wake where the earliest timer is earlier than what is armed."""
        if self.timers and (self.armed is None or self.timers[0][0] < self.armed):
            self.armed = self.timers[0][0]
            self.out.append(Wake(at=self.armed))
