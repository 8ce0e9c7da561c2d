"""KV transfers between simulated workers: which one holds KV, which one fetches it, and what a fault does to either."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.kernel.machine import Nanos
from penstock.kernel.simulation import Answer
from penstock.kernel.values import RequestId, WorkerId
from penstock.router import events as routing
from penstock_lab.engine import events as engine
from penstock_lab.engine.network_links import CancelTransfer, StartTransfer, Transferred
from penstock_lab.simulate.simulated_fleet import SimulatedFleet, SimulatedWorker

LINKS = "links"
Leg = tuple[RequestId, int]
"""A request and the attempt that makes its KV."""


@dataclass(slots=True)
class HeldKv:
    """KV that one worker makes, or holds, for another."""

    worker: WorkerId
    key: str
    done: bool = False
    unwanted: bool = False
    fetch: str | None = None
    """The engine's id of the request that fetches it."""


@dataclass(slots=True)
class KvFetch:
    """A worker that takes KV from another. ``tokens`` is None until its engine has room for them."""

    leg: Leg
    worker: WorkerId
    tokens: int | None = None
    moving: bool = False


@dataclass(slots=True)
class KvTransfers:
    """The books of all hand-offs, and the events for the engines and their links."""

    fleet: SimulatedFleet
    bytes_moved: int = 0
    fetched: int = 0
    _offers: dict[Leg, HeldKv] = field(default_factory=dict)
    _fetches: dict[str, KvFetch] = field(default_factory=dict)

    def makes(self, leg: Leg, worker: SimulatedWorker, key: str) -> None:
        """A worker is to make KV."""
        self._offers[leg] = HeldKv(worker.id, key)

    def takes(self, leg: Leg, worker: SimulatedWorker, key: str) -> None:
        """A worker is to take KV."""
        self._fetches[key] = KvFetch(leg, worker.id)
        offer = self._offers.get(leg)
        if offer is not None:
            offer.fetch = key

    def prefilled(self, now: Nanos, leg: Leg) -> Iterable[Answer]:
        """The KV is there, in full."""
        offer = self._offers[leg]
        offer.done = True
        self.fleet.workers[offer.worker].kv_retained.add(offer.key)
        if offer.unwanted:
            return self._release(now, leg)
        fetch = None if offer.fetch is None else self._fetches.get(offer.fetch)
        if offer.fetch is None or fetch is None or fetch.tokens is None:
            return ()
        return self._move(now, offer.fetch, fetch)

    def start_fetch(self, now: Nanos, effect: engine.PullKv) -> Iterable[Answer]:
        """An engine has room for the KV that it is to take."""
        fetch = self._fetches.get(effect.id)
        if fetch is None:
            return ()
        fetch.tokens = effect.tokens
        offer = self._offers.get(fetch.leg)
        if offer is None:
            return self._failed(now, effect.id, fetch)
        return self._move(now, effect.id, fetch) if offer.done else ()

    def arrived(self, now: Nanos, effect: Transferred) -> Iterable[Answer]:
        """The KV has arrived."""
        fetch = self._fetches.pop(effect.id, None)
        if fetch is None:
            return ()
        self.fetched += 1
        return (
            (now, fetch.worker, engine.KvPulled(id=RequestId(effect.id))),
            *self._release(now, fetch.leg),
        )

    def unwanted(self, now: Nanos, leg: Leg) -> Iterable[Answer]:
        """No worker will take the KV."""
        offer = self._offers.get(leg)
        if offer is None:
            return ()
        offer.unwanted = True
        return self._release(now, leg) if offer.done else ()

    def given_up(self, now: Nanos, key: str, *, release: bool) -> Iterable[Answer]:
        """A request that was to take KV has been stopped.

        Args:
            release: its engine lives, and lets the holder release the KV.
        """
        fetch = self._fetches.pop(key, None)
        if fetch is None:
            return ()
        stop: tuple[Answer, ...] = ((now, LINKS, CancelTransfer(id=key)),) if fetch.moving else ()
        return (*stop, *(self.unwanted(now, fetch.leg) if release else ()))

    def lost(self, now: Nanos, leg: Leg) -> Iterable[Answer]:
        """A worker that made KV, or held it, is gone, or was stopped."""
        offer = self._offers.pop(leg, None)
        key = None if offer is None else offer.fetch
        fetch = None if key is None else self._fetches.get(key)
        if key is None or fetch is None or fetch.tokens is None:
            return ()
        stop: tuple[Answer, ...] = ((now, LINKS, CancelTransfer(id=key)),) if fetch.moving else ()
        return (*stop, *self._failed(now, key, fetch))

    def of(self, worker: SimulatedWorker) -> list[Leg]:
        """Return what a worker makes or holds."""
        return [leg for leg, offer in self._offers.items() if offer.worker == worker.id]

    @property
    def open(self) -> int:
        """Hand-offs that are not over."""
        return len(self._offers) + len(self._fetches)

    def _move(self, now: Nanos, key: str, fetch: KvFetch) -> Iterable[Answer]:
        offer = self._offers[fetch.leg]
        source = self.fleet.workers[offer.worker]
        size = (fetch.tokens or 0) * self.fleet.plan.pools[source.pool].sim.transfer.kv_bytes_per_token
        self.bytes_moved += size
        fetch.moving = True
        return ((now, LINKS, StartTransfer(id=key, source=offer.worker, target=fetch.worker, size=size)),)

    def _failed(self, now: Nanos, key: str, fetch: KvFetch) -> Iterable[Answer]:
        del self._fetches[key]
        return ((now, fetch.worker, engine.KvPulled(id=RequestId(key), ok=False)),)

    def _release(self, now: Nanos, leg: Leg) -> Iterable[Answer]:
        offer = self._offers.pop(leg)
        worker = self.fleet.workers.get(offer.worker)
        if worker is None or offer.key not in worker.kv_retained:
            return ()
        worker.kv_retained.discard(offer.key)
        return ((now, worker.id, engine.ReleaseKv(id=RequestId(offer.key))),)


def leg_of(dispatch: routing.Dispatch) -> Leg | None:
    """Return the leg whose KV a dispatch takes, or makes; None where it has no part in a hand-off."""
    if dispatch.handoff is None:
        return None
    return (dispatch.id, dispatch.attempt if dispatch.handoff.source is None else dispatch.handoff.source_attempt)
