"""The router machine: a request's life from arrival to its one end, over the workers that are there.

Everything it decides leaves as an effect with its reason: a `Dispatch` carries the table of candidates, a `Closed`
says whose fault an end was. What an event means stands in the module that `HANDLERS` names for it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Woken
from penstock.kernel.runs import chain_of, plain
from penstock.kernel.values import RequestId, Target
from penstock.router import caches, events, lifecycle, members, sync, tuning
from penstock.router.core import Core
from penstock.router.placing import pump
from penstock.router.request import STAGE, Request
from penstock.router.settings import RouterSettings
from penstock.router.status import router_status

SNAPSHOT_VERSION = 3


def woken(core: Core, now: Nanos, event: Woken) -> None:
    """Look at everything whose time has come."""
    for kind, key in core.due(now):
        if kind == "hedge":
            lifecycle.late(core, now, RequestId(key))
        elif kind in ("deadline", "wait"):
            lifecycle.overdue(core, now, kind, RequestId(key))
        else:
            if kind == "sweep":
                sync.sweep(core, now, key)
            core.freed[key] = None


HANDLERS: Mapping[type[Event], Callable[[Core, Nanos, Any], None]] = {
    events.Arrived: lifecycle.arrived,
    events.FirstToken: lifecycle.first_token,
    events.Staged: lifecycle.staged,
    events.Grown: lifecycle.grown,
    events.Finished: lifecycle.finished,
    events.Failed: lifecycle.failed,
    events.Cancelled: lifecycle.cancelled,
    events.WorkerJoined: members.joined,
    events.WorkerReady: members.ready,
    events.WorkerLeft: members.left,
    events.WorkerDraining: members.draining,
    events.WorkerCordoned: members.cordoned,
    events.WorkerMeasured: members.measured,
    events.KvObserved: caches.observed,
    events.ReplayEnded: caches.replay_ended,
    events.KvSourceLost: caches.source_lost,
    events.PeerUpdate: sync.peer_update,
    events.PeerGone: sync.peer_gone,
    events.SettingsChanged: tuning.settings_changed,
    Woken: woken,
}


class Router(Core):
    """Place requests on workers.

    Args:
        settings: the knobs.
        name: this router's name among its peers.
        seed: of the generator that breaks ties and samples.
        shared: True publishes every placement for other routers.
        runs: prompts come as `penstock.kernel.runs.Chain`, and KV events name blocks of runs: as in a simulation.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        name: str = "router",
        seed: int = 0,
        shared: bool = False,
        runs: bool = False,
    ) -> None:
        super().__init__(settings, name=name, seed=seed, shared=shared, runs=runs)

    def handle(self, now: Nanos, event: Event) -> list[Effect]:
        """Take one event; see `penstock.router.events` for both vocabularies."""
        self.out = []
        HANDLERS[type(event)](self, now, event)
        while self.freed:
            pump(self, now, self.pools[self.freed.popitem()[0]])
        self.arm()
        return self.out

    def status(self, now: Nanos) -> dict[str, Any]:
        """Return what ``penstock status``, the page and the metrics show: plain data, measured now."""
        return router_status(self, now)

    def snapshot(self) -> Snapshot:
        state, internal, gauss = self.rng.getstate()
        return {
            "version": SNAPSHOT_VERSION,
            "name": self.name,
            "settings": msgspec.to_builtins(self.settings),
            "rng": [state, list(internal), gauss],
            "roster": self.roster.snapshot(),
            "pools": {model: pool.snapshot() for model, pool in self.pools.items()},
            "requests": [msgspec.to_builtins(request, enc_hook=plain) for request in self.requests.values()],
            "stranded": list(self.stranded),
            "timers": [list(timer) for timer in sorted(self.timers)],
            "armed": self.armed,
            "replays": [[number, list(target)] for number, target in self.replays.items()],
            "replay_id": self.replay_id,
            "dropped": self.dropped,
        }

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise InvariantError(f"a router snapshot of version {snapshot['version']}, not {SNAPSHOT_VERSION}")
        state, internal, gauss = snapshot["rng"]
        self.rng.setstate((state, tuple(internal), gauss))
        self.name = snapshot["name"]
        self.settings = msgspec.convert(snapshot["settings"], RouterSettings)
        self.roster.restore(snapshot["roster"])
        self.pools = {}
        for model, saved in snapshot["pools"].items():
            self.make_pool(model).restore(saved)
        requests = [msgspec.convert(raw, Request) for raw in snapshot["requests"]]
        for request in requests if self.runs else ():
            request.event = msgspec.structs.replace(request.event, blocks=chain_of(request.event.blocks))
        self.requests = {request.id: request for request in requests}
        self.stranded = {RequestId(id): None for id in snapshot["stranded"]}
        self.timers = [(at, kind, key) for at, kind, key in snapshot["timers"]]
        self.armed = snapshot["armed"]
        self.replays = {number: Target(*target) for number, target in snapshot["replays"]}
        self.replay_id = snapshot["replay_id"]
        self.dropped = snapshot["dropped"]

    def check(self) -> None:
        self.roster.check()
        for model, pool in self.pools.items():
            pool.check()
            mine = [request for request in self.requests.values() if request.event.model == model]
            if sum(request.counted for request in mine) != pool.inflight:
                raise InvariantError(f"{model}: {len(mine)} open requests, {pool.inflight} counted")
            if {request.id for request in mine if request.on_worker} != pool.active.own():
                raise InvariantError(f"{model}: requests on workers and active sequences differ")
            if {request.id for request in mine if request.remote is not None} != pool.active.own(STAGE):
                raise InvariantError(f"{model}: stages on workers and active sequences differ")
            for request in mine:
                if (request.phase == "queued") != (request.id in pool.queue):
                    raise InvariantError(f"request {request.id} is {request.phase}, the queue says otherwise")
        for request in self.requests.values():
            if (request.phase == "stranded") != (request.id in self.stranded):
                raise InvariantError(f"request {request.id} is {request.phase}, the stranded ones say otherwise")
            remote = request.remote
            alone = remote is not None and not request.on_worker and not remote.done
            if (request.phase == "remote") != alone and request.id not in self.stranded:
                raise InvariantError(f"request {request.id} is {request.phase}, its stage says otherwise")
            if request.phase in ("arrived", "done"):
                raise InvariantError(f"request {request.id} was left in phase {request.phase}")
