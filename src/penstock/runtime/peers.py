"""How do several routers of one cluster stay in step? They tell each other every placement, best effort."""

import asyncio
import logging

import msgspec

from penstock.adapters.planes.zmq import ZmqPlane
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.machine import Nanos
from penstock.kernel.values import RequestId
from penstock.kernel.wire import NewerVersion, WireDecoder
from penstock.router.events import PeerGone, PeerUpdate, Placement, Publish
from penstock.runtime.follow import follow
from penstock.runtime.live import Live
from penstock.runtime.opening import Plane

log = logging.getLogger("penstock.peers")

FRONTENDS = "frontends/"
TOPIC = "active"
GATHER = 0.005
"""Seconds for which placements are gathered into one message: sending and hearing one each costs as much as routing."""
GATHERED_MAX = 4096
"""Most placements of one message."""


class FrontendCard(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the store for a frontend process."""

    version: int = 1
    id: str
    url: str
    admin_url: str
    pid: int
    plane: str
    """Where its event plane is heard directly (ZMQ); empty where that goes through somebody in the middle."""
    run: str
    page: str = ""
    """Where a person finds its admin routes; ``admin_url`` is for processes, and this one's alone."""


class Placements(msgspec.Struct, frozen=True, kw_only=True):
    """What one message on topic ``active`` holds: a frontend's placements of the last few milliseconds, in order."""

    version: int = 1
    placements: list[Placement]


_cards = WireDecoder(FrontendCard, "a frontend's card in the store")


class Peers:
    """Publish our placements, hear those of the other frontends, forget a frontend that is gone."""

    def __init__(self, store: Store, live: Live, plane: Plane, card: FrontendCard, ttl: float) -> None:
        self.cards: dict[str, FrontendCard] = {}
        self.malformed = 0
        self._store = store
        self._live = live
        self._plane = plane
        self._card = card
        self._ttl = ttl
        self._available = True
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = WireDecoder(Placements, "a message of placements", binary=True)
        self.newer = 0
        """Messages of a newer release, which were left out."""
        self._outbox: dict[RequestId, list[Placement]] = {}
        """What has not been sent yet, by request."""
        self._gathered = 0
        self._sending: asyncio.TimerHandle | None = None
        live.on(Publish, self._publish)

    async def announce(self) -> None:
        """Stand in the store for as long as this process lives."""
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
            # Only how far it is by now matters, beside where it was placed: that teaches what a cache holds.
            kept = [
                step for step in steps if step.step == "placed" or (step.step == "first" and placement.step != "ended")
            ]
            self._gathered -= len(steps) - len(kept)
            steps[:] = kept
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
        message = Placements(placements=[placement for steps in outbox.values() for placement in steps])
        self._plane.send(TOPIC, self._encode(message))

    async def _hear(self) -> None:
        async for message in self._plane.subscribe(TOPIC):
            try:
                heard: Placements = self._decoder.decode(message.payload)
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
            self._store, FRONTENDS, known=lambda: self.cards, put=self._came, gone=self._gone, frozen=self._frozen
        )

    def _frozen(self, error: StoreUnavailable | None) -> None:
        if error is not None and self._available:
            log.warning("the other frontends can't be seen: %s", error)
        self._available = error is None

    async def _came(self, key: str, value: bytes) -> None:
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

    async def _gone(self, key: str) -> None:
        card = self.cards.pop(key, None)
        if card is not None:
            if isinstance(self._plane, ZmqPlane):
                await self._plane.disconnect(card.plane)
            self._live.post("router", PeerGone(router=card.id))
