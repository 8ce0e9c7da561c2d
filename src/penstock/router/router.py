"""The router machine: a request's life from arrival to its one end, over the workers that are there.

Everything it decides leaves as an effect with its reason: a `Dispatch` carries the table of candidates, a `Closed`
names the party at fault for an end. `HANDLERS` names the function that handles each event.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Wake, Woken, nanos, read_snapshot, write_snapshot
from penstock.kernel.values import RequestId, Slo
from penstock.router import events
from penstock.router.events import PluginLeftOut, SettingsChanged
from penstock.router.kv_index.pool_index import BLOCKS, PromptForm
from penstock.router.model_pool import RouterMemory
from penstock.router.requests import request_events
from penstock.router.requests.scheduling import pump
from penstock.router.routed_request import STAGE
from penstock.router.router_state import RouterState
from penstock.router.settings import RouterSettings
from penstock.router.status import router_status
from penstock.router.status_rows import RouterStatus
from penstock.router.workers import worker_events


def settings_changed(core: RouterState, now: Nanos, event: SettingsChanged) -> None:
    """Take other settings. Decisions stay; queued requests are ordered anew, and their limit counts from queueing."""
    settings = core.settings = event.settings
    core.use_plugins(settings)
    core.slo = event.slo
    for model, pool in core.pools.items():
        pool.use(settings)
        if pool.fair is not None:
            pool.fair.recount(request for request in core.requests.values() if request.event.model == model)
        core.freed[model] = None
    for request in core.requests.values():
        if request.queued_since is not None:
            core.timer(request.queued_since + nanos(settings.queue.wait_max), "wait", request.id)
    changed = ", ".join(event.keys)
    core.note("settings_changed", f"{event.by or 'an operator'} changed {changed}", keys=list(event.keys), by=event.by)


def plugin_left_out(core: RouterState, now: Nanos, event: PluginLeftOut) -> None:
    """Go on without a plug-in that takes too long, as whoever measures that says."""
    if core.plugins is not None:
        core.plugins.leave_out(event.name, event.reason)


SNAPSHOT_VERSION = 9


def woken(core: RouterState, now: Nanos, event: Woken) -> None:
    """Look at everything whose time has come."""
    for kind, key in core.due(now):
        if kind == "hedge":
            request_events.late(core, now, RequestId(key))
        elif kind in ("deadline", "wait"):
            request_events.overdue(core, now, kind, RequestId(key))
        else:
            if kind == "sweep":
                worker_events.sweep(core, now, key)
            elif (pool := core.pools.get(key)) is not None and pool.fair is not None:
                pool.fair.kicked = False
            core.freed[key] = None


HANDLERS: Mapping[type[Event], Callable[[RouterState, Nanos, Any], None]] = {
    events.Arrived: request_events.arrived,
    events.FirstToken: request_events.first_token,
    events.Staged: request_events.staged,
    events.Grown: request_events.grown,
    events.Finished: request_events.finished,
    events.Failed: request_events.failed,
    events.Cancelled: request_events.cancelled,
    events.WorkerJoined: worker_events.joined,
    events.WorkerReady: worker_events.ready,
    events.WorkerLeft: worker_events.left,
    events.WorkerDraining: worker_events.draining,
    events.WorkerCordoned: worker_events.cordoned,
    events.WorkerMeasured: worker_events.measured,
    events.TiersMeasured: worker_events.tiers_measured,
    events.KvObserved: worker_events.observed,
    events.ReplayEnded: worker_events.replay_ended,
    events.KvSourceJoining: worker_events.source_joining,
    events.KvSourceLost: worker_events.source_lost,
    events.PeerUpdate: worker_events.peer_update,
    events.PeerGone: worker_events.peer_left,
    events.AdapterLoaded: worker_events.adapter_loaded,
    events.AdapterFailed: worker_events.adapter_failed,
    events.AdapterMissing: worker_events.adapter_missing,
    events.AdaptersListed: worker_events.adapters_listed,
    events.AdapterDesired: worker_events.adapter_desired,
    events.AdaptersWanted: worker_events.adapters_wanted,
    events.AdapterDropped: worker_events.adapter_dropped,
    events.SettingsChanged: settings_changed,
    events.PluginLeftOut: plugin_left_out,
    Woken: woken,
}


class Router(RouterState):
    """Place requests on workers.

    Args:
        settings: the knobs; ``slo``: the cluster's targets, which a remote prefill should keep.
        name: this router's name among its peers.
        seed: of the generator that breaks ties and samples.
        shared: True publishes every placement for other routers.
        form: in which prompts and KV events name blocks.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        slo: Slo = Slo(),
        name: str = "router",
        seed: int = 0,
        shared: bool = False,
        form: PromptForm = BLOCKS,
    ) -> None:
        super().__init__(settings, slo=slo, name=name, seed=seed, shared=shared, form=form)

    def handle(self, now: Nanos, event: Event) -> list[Effect]:
        """Take one event; see `penstock.router.events` for both vocabularies."""
        self.out = []
        HANDLERS[type(event)](self, now, event)
        while self.freed:
            pool = self.pools[self.freed.popitem()[0]]
            if pool.queue.waiting or self.waiting_for_worker:
                pump(self, now, pool)
        timers = self.timers
        if timers and (self.armed is None or timers[0][0] < self.armed):
            self.armed = timers[0][0]
            self.out.append(Wake(at=self.armed))
        return self.out

    def status(self, now: Nanos) -> RouterStatus:
        """Return what ``penstock status``, the page and the metrics show, measured now."""
        return router_status(self, now)

    def snapshot(self) -> Snapshot:
        state = RouterMemory(
            name=self.name,
            settings=self.settings,
            slo=self.slo,
            rng=self.rng.getstate(),
            roster=self.roster.snapshot(),
            pools={model: pool.snapshot() for model, pool in self.pools.items()},
            requests=self.requests,
            waiting_for_worker=self.waiting_for_worker,
            timers=sorted(self.timers),
            armed=self.armed,
            replays=self.replays,
            replay_id=self.replay_id,
            dropped=self.dropped,
            plugins_left_out={} if self.plugins is None else self.plugins.left_out,
        )
        return write_snapshot(state, SNAPSHOT_VERSION)

    def restore(self, snapshot: Snapshot) -> None:
        state = read_snapshot(snapshot, RouterMemory, SNAPSHOT_VERSION, "a router")
        self.rng.setstate(state.rng)
        self.name, self.settings, self.slo = state.name, state.settings, state.slo
        self.use_plugins(self.settings)
        if self.plugins is not None:
            self.plugins.restore(state.plugins_left_out)
        self.roster.restore(state.roster)
        self.pools = {}
        for model, saved in state.pools.items():
            self.make_pool(model).restore(saved)
        self.requests, self.waiting_for_worker = state.requests, state.waiting_for_worker
        for request in self.requests.values():
            request.event = msgspec.structs.replace(request.event, prompt=self.form.prompt(request.event.prompt))
            if request.resumed_prompt is not None:
                request.resumed_prompt = self.form.prompt(request.resumed_prompt)
        self.timers, self.armed = state.timers, state.armed
        self.replays, self.replay_id, self.dropped = state.replays, state.replay_id, state.dropped

    def check(self) -> None:
        self.roster.check()
        for model, pool in self.pools.items():
            pool.check()
            mine = [request for request in self.requests.values() if request.event.model == model]
            if sum(request.counted for request in mine) != pool.counts.inflight:
                raise InvariantError(f"{model}: {len(mine)} open requests, {pool.counts.inflight} counted")
            if {request.id for request in mine if request.on_worker} != pool.active.own():
                raise InvariantError(f"{model}: requests on workers and active sequences differ")
            if {request.id for request in mine if request.remote is not None} != pool.active.own(STAGE):
                raise InvariantError(f"{model}: stages on workers and active sequences differ")
            if pool.fair is not None and sum(pool.fair.serving.values()) != sum(request.work for request in mine):
                raise InvariantError(f"{model}: tokens of its requests and of the tenants' shares differ")
            for request in mine:
                if (request.phase == "queued") != (request.id in pool.queue):
                    raise InvariantError(f"request {request.id} is {request.phase}, the queue says otherwise")
        for request in self.requests.values():
            if (request.phase == "waiting_for_worker") != (request.id in self.waiting_for_worker):
                raise InvariantError(f"request {request.id} is {request.phase}, the stranded ones say otherwise")
            remote = request.remote
            alone = remote is not None and not request.on_worker and not remote.done
            if (request.phase == "remote") != alone and request.id not in self.waiting_for_worker:
                raise InvariantError(f"request {request.id} is {request.phase}, its stage says otherwise")
            if request.phase in ("arrived", "done"):
                raise InvariantError(f"request {request.id} was left in phase {request.phase}")
