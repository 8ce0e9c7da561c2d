"""Replica sync between the routers of one cluster: each publishes its placements to the others, best effort."""

import asyncio
import logging

import msgspec

from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.machine import Nanos
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.values import RequestId
from penstock.router.events import PeerGone, PeerUpdate, Placement, Publish
from penstock.runtime.backends import Plane
from penstock.runtime.cluster_state.store_watch import follow
from penstock.runtime.live_driver import LiveDriver

log = logging.getLogger("penstock.peers")

FRONTENDS = "frontends/"
TOPIC = "active"
GATHER = 0.005
"""Seconds for which placements are gathered into one message: a message for each would cost as much as routing."""
GATHERED_MAX = 4096
"""Most placements of one message."""


class FrontendCard(msgspec.Struct, frozen=True, kw_only=True):
    """A frontend process's entry in the store."""

    version: int = 1
    id: str
    url: str
    admin_url: str
    pid: int
    plane: str
    """Endpoint of its event plane (ZMQ); empty where messages go through a forwarder or broker."""
    run: str
    page: str = ""
    """URL of the admin routes for people; ``admin_url`` is for processes, and this one's alone."""


class PlacementBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message on topic ``active``: a frontend's placements of the last few milliseconds, in order."""

    version: int = 2
    placements: list[Placement]


_cards = VersionedDecoder(FrontendCard, "a frontend's card in the store")


class PlacementSync:
    """Publish our placements, receive those of the other frontends, forget a frontend that is gone."""

    def __init__(self, store: Store, live: LiveDriver, plane: Plane, card: FrontendCard, ttl: float) -> None:
        self.cards: dict[str, FrontendCard] = {}
        self.malformed = 0
        self._store = store
        self._live = live
        self._plane = plane
        self._card = card
        self._ttl = ttl
        self._available = True
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = VersionedDecoder(PlacementBatch, "a message of placements", binary=True)
        self.newer = 0
        """Messages of a newer release, which were left out."""
        self._outbox: dict[RequestId, list[Placement]] = {}
        """Placements not sent yet, by request."""
        self._gathered = 0
        self._sending: asyncio.TimerHandle | None = None
        live.on(Publish, self._publish)

    async def announce(self) -> None:
        """Put this frontend's card into the store for as long as this process lives."""
        await self._store.put(FRONTENDS + self._card.id, msgspec.json.encode(self._card), ttl=self._ttl)

    async def run(self) -> None:
        """Follow the other frontends and their placements until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._hear())
                group.create_task(self._watch())
        finally:
            if self._sending is not None:
                self._sending.cancel()

    def _publish(self, now: Nanos, sender: str, effect: Publish) -> None:
        if not self.cards:
            return
        placement = effect.placement
        steps = self._outbox.setdefault(placement.id, [])
        if steps and placement.step in ("ended", "grown"):
            # Only its newest progress matters, and where it was placed: that shows what a cache holds.
            remaining = [
                step for step in steps if step.step == "placed" or (step.step == "first" and placement.step != "ended")
            ]
            self._gathered -= len(steps) - len(remaining)
            steps[:] = remaining
        steps.append(placement)
        self._gathered += 1
        if self._gathered >= GATHERED_MAX:
            self._send()
        elif self._sending is None:
            self._sending = asyncio.get_running_loop().call_later(GATHER, self._send)

    def _send(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        outbox, self._outbox, self._gathered = self._outbox, {}, 0
        message = PlacementBatch(placements=[placement for steps in outbox.values() for placement in steps])
        self._plane.send(TOPIC, self._encode(message))

    async def _hear(self) -> None:
        async for message in self._plane.subscribe(TOPIC):
            try:
                heard: PlacementBatch = self._decoder.decode(message.payload)
            except NewerVersion as error:
                self._refuse(error)
                continue
            except msgspec.DecodeError:
                self.malformed += 1
                continue
            for placement in heard.placements:
                self._live.post("router", PeerUpdate(router=message.publisher, placement=placement))

    async def _watch(self) -> None:
        await follow(
            self._store, FRONTENDS, known=lambda: self.cards, put=self._put, deleted=self._deleted, frozen=self._frozen
        )

    def _frozen(self, error: StoreUnavailable | None) -> None:
        if error is not None and self._available:
            log.warning("the other frontends can't be seen: %s", error)
        self._available = error is None

    async def _put(self, key: str, value: bytes) -> None:
        try:
            card: FrontendCard = _cards.decode(value)
        except NewerVersion as error:
            self._refuse(error)
            return
        except msgspec.DecodeError:
            self.malformed += 1
            return
        if card.id == self._card.id or key in self.cards:
            return
        self.cards[key] = card
        if isinstance(self._plane, ZmqPlane):
            await self._plane.connect(card.plane)

    def _refuse(self, error: NewerVersion) -> None:
        self.newer += 1
        if self.newer & (self.newer - 1) == 0:  # the 1st, 2nd, 4th...: one comes with every request
            log.warning("message %d of another frontend left out: %s", self.newer, error)

    async def _deleted(self, key: str) -> None:
        card = self.cards.pop(key, None)
        if card is not None:
            if isinstance(self._plane, ZmqPlane):
                await self._plane.disconnect(card.plane)
            self._live.post("router", PeerGone(router=card.id))
