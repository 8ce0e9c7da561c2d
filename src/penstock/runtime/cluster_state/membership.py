"""Membership: watches the store's worker cards and turns changes into `WorkerJoined` and `WorkerLeft` events.

A worker or frontend whose lease an operator revoked in the store is drained (docs/why/leases-in-etcd.md says why): the
routers forget it at once, as its key is gone; its running requests finish.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import WorkerDraining, WorkerJoined, WorkerLeft
from penstock.runtime.cluster_state.desired_state import DRAINS, DrainSpec, put
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.store_watch import RETRY, follow
from penstock.runtime.live_driver import LiveDriver

log = logging.getLogger("penstock.membership")

WORKERS = "workers/"
REVOKED = "a revoked lease"


class MembershipEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's entry in the store: its card, whether it is being drained, and whether its health check is silent."""

    version: int = 1
    card: WorkerCard
    draining: bool = False
    silent: bool = False


_entries = VersionedDecoder(MembershipEntry, "its entry in the store")


def key_of(worker: WorkerId) -> str:
    return WORKERS + worker


def entry_of(raw: bytes) -> MembershipEntry | None:
    """Return an entry under `WORKERS`; None where it can't be read, or is of a newer release."""
    try:
        entry: MembershipEntry = _entries.decode(raw)
    except (msgspec.DecodeError, NewerVersion):
        return None
    return entry


class Membership:
    """Follow ``workers/`` in a store.

    A store that can't be read freezes membership: no worker is dropped, and changes are reconciled when it can be
    read again.

    Args:
        started, stopped: called for a worker that came or went, to start and stop receiving its events.
        leaving: called for a draining worker, once the router knows.
        heard: called when all changes have been passed on.
    """

    def __init__(
        self,
        store: Store,
        live: LiveDriver,
        *,
        started: Callable[[WorkerCard], None],
        stopped: Callable[[WorkerCard], Awaitable[None]],
        leaving: Callable[[WorkerCard], None] = lambda card: None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.available = True
        self.read = asyncio.Event()
        """Set once all present workers are known."""
        self.malformed = 0
        self.newer = 0
        """Entries of a newer release, which were left out."""
        self.silent: set[WorkerId] = set()
        """Workers that do not answer the health checks of their supervisors."""
        self._store = store
        self._live = live
        self._started = started
        self._stopped = stopped
        self._leaving = leaving
        self._heard = heard
        self._known: dict[str, MembershipEntry] = {}
        self._epochs: dict[str, int] = {}
        """The epochs of the known workers, as their own supervisors write them."""
        self._left: dict[str, int] = {}
        """The last epoch under which a worker that left was known here."""

    @property
    def cards(self) -> list[WorkerCard]:
        return [entry.card for entry in self._known.values()]

    async def run(self) -> None:
        """Watch until cancelled."""
        await follow(
            self._store,
            WORKERS,
            known=lambda: self._known,
            put=self._put,
            deleted=self._deleted,
            frozen=self._frozen,
            read=self._all_read,
        )

    def _all_read(self) -> None:
        self.read.set()
        self._heard()

    def _frozen(self, error: StoreUnavailable | None) -> None:
        if error is not None and self.available:
            log.warning("membership is frozen at %d workers: %s", len(self._known), error)
        elif error is None and not self.available:
            log.info("the store can be read again; membership is reconciled")
        self.available = error is None

    async def _put(self, key: str, value: bytes) -> None:
        try:
            entry: MembershipEntry = _entries.decode(value)
        except NewerVersion as error:
            self.newer += 1
            log.warning("worker %s is left out: %s", key, error)
            return
        except msgspec.DecodeError as error:
            self.malformed += 1
            log.warning("what stands under %s is not a worker: %s", key, error)
            return
        known = self._known.get(key)
        if known is not None and self._epochs[key] < entry.card.epoch:
            await self._stopped(known.card)
            self._left[key] = known.card.epoch
            known = None
        self._epochs[key] = entry.card.epoch
        entry = msgspec.structs.replace(entry, card=self._here(key, entry.card, known))
        self._known[key] = entry
        if known is None:
            # A worker that drains already must not get a single request between the two events.
            self._live.post("router", WorkerJoined(card=entry.card, ready=not entry.draining))
            self._started(entry.card)
        (self.silent.add if entry.silent else self.silent.discard)(entry.card.id)
        if entry.draining and (known is None or not known.draining):
            self._live.post("router", WorkerDraining(worker=entry.card.id, epoch=entry.card.epoch))
            self._leaving(entry.card)

    def _here(self, key: str, card: WorkerCard, known: MembershipEntry | None) -> WorkerCard:
        """Return a card with the epoch under which this frontend knows the worker.

        A worker that was away for longer than its lease, because its host was cut off, comes back with its old card. To
        the router it is a new worker all the same: events of the one that left must not count for it.
        """
        if known is not None:
            return msgspec.structs.replace(card, epoch=known.card.epoch)
        left = self._left.get(key, -1)
        return card if card.epoch > left else msgspec.structs.replace(card, epoch=left + 1)

    async def _deleted(self, key: str) -> None:
        entry = self._known.pop(key, None)
        if entry is None:
            return
        self._left[key] = entry.card.epoch
        self.silent.discard(entry.card.id)
        self._live.post(
            "router",
            WorkerLeft(worker=entry.card.id, epoch=entry.card.epoch, reason="it is no longer in the store"),
        )
        with contextlib.suppress(asyncio.CancelledError):
            await self._stopped(entry.card)


class RevokedLeases:
    """Turns revoked keys of this process into `DrainSpec`s of their workers and frontends: `add` keys, and `run` it."""

    def __init__(self) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue()

    def add(self, key: str) -> None:
        """Take a key; one that is of nothing that can be drained is ignored."""
        self._keys.put_nowait(key)

    async def run(self, store: Store) -> None:
        """Write the specs until cancelled; one that can't be written is written later."""
        while True:
            name = drained_by(await self._keys.get())
            while name is not None:
                try:
                    await put(store, DRAINS + name, DrainSpec(by=REVOKED))
                    break
                except StoreUnavailable as error:
                    log.warning("the desired drain of %s can't be written: %s", name, error)
                    await asyncio.sleep(RETRY)


def drained_by(key: str) -> str | None:
    """Return the worker (``main-0``) or frontend (``frontend-1``) of a key, or None."""
    if key.startswith(WORKERS):
        return key.removeprefix(WORKERS)
    if key.startswith(FRONTENDS):
        return key.removeprefix(FRONTENDS).rpartition("-")[0] or None
    return None
