"""In-process event plane: connects the parts of one process with the same contract as a network plane."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from penstock.adapters.seams import PlaneMessage


class InprocBus:
    """The bus that the planes of one process share."""

    def __init__(self) -> None:
        self.planes: set[InprocPlane] = set()


class InprocPlane:
    """An `EventPlane` in memory.

    Args:
        name: publisher's name, unlike all others' on the bus.
        bus: shared by the planes that exchange messages.
        limit: messages kept for a slow subscriber; beyond it the newest are lost, as the gap in ``sequence`` shows.
    """

    def __init__(self, name: str, bus: InprocBus, limit: int = 10_000) -> None:
        self.name = name
        self.lost = 0
        """Messages lost because a subscriber here was too slow."""
        self._bus = bus
        self._limit = limit
        self._sequences: Counter[str] = Counter()
        self._queues: dict[str, set[asyncio.Queue[PlaneMessage | None]]] = {}
        bus.planes.add(self)

    async def publish(self, topic: str, payload: bytes) -> None:
        """Send to all other planes on the bus that subscribe at present."""
        message = PlaneMessage(self.name, topic, self._sequences[topic], payload)
        self._sequences[topic] += 1
        for plane in self._bus.planes:
            if plane is not self:
                plane._hear(message)

    def subscribe(self, topic: str) -> AsyncIterator[PlaneMessage]:
        """Receive from now on what others publish on a topic."""
        queue: asyncio.Queue[PlaneMessage | None] = asyncio.Queue()
        self._queues.setdefault(topic, set()).add(queue)
        return self._messages(topic, queue)

    async def close(self) -> None:
        """Leave the bus; subscriptions end after the messages that they already have."""
        self._bus.planes.discard(self)
        for queues in self._queues.values():
            for queue in queues:
                queue.put_nowait(None)
        self._queues.clear()

    def _hear(self, message: PlaneMessage) -> None:
        for queue in self._queues.get(message.topic, ()):
            if queue.qsize() < self._limit:
                queue.put_nowait(message)
            else:
                self.lost += 1

    async def _messages(self, topic: str, queue: "asyncio.Queue[PlaneMessage | None]") -> AsyncIterator[PlaneMessage]:
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.get(topic, set()).discard(queue)
