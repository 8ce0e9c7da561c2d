"""`RouterState`: what all parts of the router share: the state of the machine, its outgoing effects and its timers.

It holds state and the few moves that every part needs; the handlers of events are functions over it, in `scheduling`,
`request_events`, `worker_events`, `kv_event_handlers` and `replica_sync`.
"""

import heapq
import random
from typing import Any

import msgspec

from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.values import RequestId, Slo, Target
from penstock.router.events import Abort, AdapterChange, OperatorNote, Placement, Publish
from penstock.router.kv_index.pool_index import PromptForm
from penstock.router.model_pool import ModelPool, Timer
from penstock.router.routed_request import HEDGE, STAGE, RoutedRequest
from penstock.router.selection.router_plugins import RouterPlugins
from penstock.router.settings import RouterSettings
from penstock.router.workers.roster import Roster


class RouterState:
    """The router's state: roster, one `ModelPool` per model, open requests, timers."""

    def __init__(
        self, settings: RouterSettings, *, slo: Slo, name: str, seed: int, shared: bool, form: PromptForm
    ) -> None:
        self.settings = settings
        self.started = settings
        """As of the start: they decide which index a pool keeps, whatever is changed later."""
        self.slo = slo
        self.name = name
        self.shared = shared
        self.form = form
        self.rng = random.Random(seed)
        self.roster = Roster()
        self.pools: dict[str, ModelPool] = {}
        self.requests: dict[RequestId, RoutedRequest] = {}
        self.dropped = 0
        """Events about requests, attempts, workers or replays that are not, or no longer, known."""
        self.replays: dict[int, Target] = {}
        self.replay_id = 0
        self.waiting_for_worker: dict[RequestId, None] = {}
        """Requests whose worker was lost in the middle and for which no other is there yet."""
        self.freed: dict[str, None] = {}
        """Models whose waiting requests should be looked at once the present event has been handled."""
        self.out: list[Effect] = []
        self.timers: list[tuple[Nanos, Timer, str]] = []
        self.armed: Nanos | None = None
        self.plugins = RouterPlugins(settings.plugins, self._left_out) if settings.plugins else None
        """Scorers and filters of others; None where there are none, which costs nothing."""

    def make_pool(self, model: str) -> ModelPool:
        """Keep state for a model from now on."""
        pool = self.pools[model] = ModelPool(model, self.started, self.form)
        if self.settings is not self.started:
            pool.use(self.settings)
        return pool

    # --- effects ----------------------------------------------------------------------------------------------------

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Send a note to the operator."""
        self.out.append(OperatorNote(kind=kind, text=text, fields=fields))

    def _left_out(self, name: str, text: str) -> None:
        self.note("plugin_left_out", text, plugin=name)

    def use_plugins(self, settings: RouterSettings) -> None:
        """Have the plug-ins that settings name.

        Raises:
            ConfigError: one of them is not there, or does not take its options.
        """
        if self.plugins is not None:
            self.plugins.use(settings.plugins)
        elif settings.plugins:
            self.plugins = RouterPlugins(settings.plugins, self._left_out)

    def publish(self, pool: ModelPool, request: RequestId, step: Any, target: Target, **more: Any) -> None:
        """Send a placement to the other routers, where there may be any."""
        if self.shared:
            self.out.append(
                Publish(placement=Placement(step=step, id=request, model=pool.model, target=target, **more))
            )

    def waiting(self, model: str) -> int:
        """Return how many requests of a model wait for a worker, those included for which there is none."""
        pool = self.pools.get(model)
        stranded = sum(self.requests[id].event.model == model for id in self.waiting_for_worker)
        return stranded + (0 if pool is None else len(pool.queue))

    # --- moves of a request -----------------------------------------------------------------------------------------

    def mark(self, request: RoutedRequest, **changes: Any) -> None:
        """Record changes of its present leg."""
        request.legs[-1] = msgspec.structs.replace(request.legs[-1], **changes)

    def mark_leg(self, request: RoutedRequest, leg: int, **changes: Any) -> None:
        """Record changes of one of its legs."""
        request.legs[leg] = msgspec.structs.replace(request.legs[leg], **changes)

    def abort(self, request: RoutedRequest, reason: str) -> None:
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
        self,
        request: RoutedRequest,
        pool: ModelPool,
        target: Target,
        *,
        cached: int,
        unhashed_blocks: int,
        now: Nanos,
        owner: str = "",
    ) -> None:
        """Count a request's prompt as load of a target, and tell the other routers unless it is only a hedge."""
        event = request.event
        prompt, osl = request.prompt, event.preferences.osl or 0
        unloaded: tuple[str, ...] = ()
        if event.adapter is not None and target.worker in pool.adapters.workers:
            plan = pool.adapters.take(target.worker, event.adapter, event.id)
            request.adapter_plan, request.adapter_cold, unloaded = plan.text, plan.waits, plan.unload
            if plan.load:
                card = self.roster.workers[target.worker].card
                self.out.append(AdapterChange(card=card, load=event.adapter, unload=unloaded))
        if not osl and self.settings.expect_output:
            osl = round(pool.expected_output(event.preferences) or 0)
        left = -(-max(0, osl - request.tokens) // pool.index.block_size)
        pool.active.place(
            event.id,
            target,
            prefill_tokens=prompt.isl - cached,
            blocks=prompt.blocks,
            unhashed_blocks=unhashed_blocks,
            now=now,
            router=owner,
            osl_blocks=left,
        )
        if self.shared and owner != HEDGE:
            session = None if owner else event.preferences.session
            name = self.leg_id(event.id) if owner else event.id
            more = {"cached": cached, "osl": max(0, osl - request.tokens)}
            names = {"adapter": event.adapter, "unloaded": unloaded}
            # A later leg, of a hand-off or a migration, is no new work of its tenant.
            work = {} if request.legs or not request.work else {"tenant": event.tenant, "work": request.work}
            self.publish(pool, name, "placed", target, prompt=prompt, session=session, **more, **names, **work)

    def expected_pause(self, request: RoutedRequest, pool: ModelPool) -> float | None:
        """Return after how many seconds the session's next request is likely; None where nobody knows."""
        wish = request.event.preferences
        if wish.next_in is not None or wish.session is None:
            return wish.next_in
        return pool.habits.pause(wish.program or wish.session)

    def leg_id(self, request: RequestId) -> RequestId:
        """Return the name under which other routers know a stage before a request's last one."""
        return RequestId(request + STAGE)

    def unstage(self, request: RoutedRequest, pool: ModelPool) -> None:
        """A stage before the last is over in every way: its load goes."""
        pool.encoding.pop(request.id, None)
        remote = request.remote
        if remote is not None:
            request.remote = None
            pool.active.end(request.id, STAGE)
            self.publish(pool, self.leg_id(request.id), "ended", remote.target)
            self.freed[pool.model] = None

    def release(self, request: RoutedRequest, pool: ModelPool) -> None:
        """Take the load of a request that is on a worker off its target."""
        if request.target is not None:
            id = request.event.id
            pool.active.end(id)
            if request.hedge is not None:
                pool.active.end(id, HEDGE)
                request.hedge = None
            if self.shared:
                self.publish(pool, id, "ended", request.target)
            self.freed[pool.model] = None

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
