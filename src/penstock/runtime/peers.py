"""How do several routers of one cluster stay in step? They tell each other every placement, best effort."""

import asyncio
import logging

import msgspec

from penstock.adapters.planes.zmq import ZmqPlane
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.machine import Nanos
from penstock.router.events import PeerGone, PeerUpdate, Placement, Publish
from penstock.runtime.follow import follow
from penstock.runtime.live import Live

log = logging.getLogger("penstock.peers")

FRONTENDS = "frontends/"
TOPIC = "active"


class FrontendCard(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the store for a frontend process."""

    id: str
    url: str
    admin_url: str
    pid: int
    plane: str
    run: str


class Peers:
    """Publish our placements, hear those of the other frontends, forget a frontend that is gone."""

    def __init__(self, store: Store, live: Live, plane: ZmqPlane, card: FrontendCard, ttl: float) -> None:
        self.cards: dict[str, FrontendCard] = {}
        self.malformed = 0
        self._store = store
        self._live = live
        self._plane = plane
        self._card = card
        self._ttl = ttl
        self._available = True
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(Placement)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=65_536)
        self.unsent = 0
        """Placements that found the outbox full: load that the others do not see until it expires."""
        live.on(Publish, self._publish)

    async def announce(self) -> None:
        """Stand in the store for as long as this process lives."""
        await self._store.put(FRONTENDS + self._card.id, msgspec.json.encode(self._card), ttl=self._ttl)

    async def run(self) -> None:
        """Follow the other frontends and their placements until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._hear())
            group.create_task(self._watch())

    def _publish(self, now: Nanos, sender: str, effect: Publish) -> None:
        if not self.cards:
            return
        try:
            self._outbox.put_nowait(self._encode(effect.placement))
        except asyncio.QueueFull:
            self.unsent += 1

    async def _send(self) -> None:
        while True:
            await self._plane.publish(TOPIC, await self._outbox.get())

    async def _hear(self) -> None:
        async for message in self._plane.subscribe(TOPIC):
            try:
                placement = self._decoder.decode(message.payload)
            except msgspec.DecodeError:
                self.malformed += 1
                continue
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
            card = msgspec.json.decode(value, type=FrontendCard)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        if card.id == self._card.id or key in self.cards:
            return
        self.cards[key] = card
        await self._plane.connect(card.plane)

    async def _gone(self, key: str) -> None:
        card = self.cards.pop(key, None)
        if card is not None:
            await self._plane.disconnect(card.plane)
            self._live.post("router", PeerGone(router=card.id))
