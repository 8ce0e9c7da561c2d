"""NATS event plane: messages between Penstock's processes over core NATS; nothing is stored, gaps are visible.

A message is ``[version u8, sequence u64 big-endian, length of the name u16, name, payload]`` on the subject
``<prefix>.<topic>``, and behind a 64-character signature where the cluster has a secret: a broker may be shared.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from penstock.adapters.nats_link import NatsLink, subject_of
from penstock.adapters.seams import PlaneMessage
from penstock.adapters.task_cancel import end
from penstock.config.settings.discovery_settings import NatsSettings
from penstock.kernel.message_version import NewerVersion, refuse_newer
from penstock.kernel.secret import ClusterSecret

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

VERSION = 1
"""Of the frame around a payload; it grows only where an older reader would misunderstand it."""
OUTBOX_MAX = 10_000
"""Messages that wait to be sent; more are lost, as the gap in ``sequence`` shows."""
_CODE = 64
_HEAD = 11
_PURPOSE = "plane message"


class NatsPlane:
    """An `EventPlane` over NATS.

    Args:
        name: publisher's name, unlike all others'.
        settings: servers and credentials.
        prefix: of all subjects.
        limit: messages kept per subscriber; beyond it they are lost, as the gap in ``sequence`` shows.
        secret: of the cluster. With it messages are signed, and those of others are left out.
    """

    def __init__(
        self,
        name: str,
        settings: NatsSettings,
        *,
        prefix: str = "penstock",
        limit: int = 10_000,
        secret: ClusterSecret | None = None,
    ) -> None:
        self.name = name
        self.malformed = 0
        self.newer = 0
        """Messages left out because their version is above ours."""
        self.foreign = 0
        """Messages that were not signed with our secret."""
        self.lost = 0
        """Messages lost because there was no connection, or because a subscriber here was too slow."""
        self._link = NatsLink(settings, name)
        self._prefix = prefix
        self._limit = limit
        self._secret = secret
        self._sequences: Counter[str] = Counter()
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(OUTBOX_MAX)
        self._queues: dict[str, set[asyncio.Queue[PlaneMessage | None]]] = {}
        self._listening: set[asyncio.Task[Callable[[], Awaitable[None]]]] = set()
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def problem(self) -> str | None:
        """Why nothing is sent or received at present, or None."""
        return self._link.problem

    async def publish(self, topic: str, payload: bytes) -> None:
        """Send to all present subscribers. Without a broker the message is lost, and nothing waits."""
        self.send(topic, payload)
        if self._outbox.qsize() > OUTBOX_MAX // 2:
            await asyncio.sleep(0)

    def send(self, topic: str, payload: bytes) -> None:
        """Do the same from a plain function, with the event loop running; a plane that is closed sends nothing."""
        if self._closed:
            return
        self._start()
        number = self._sequences[topic]
        self._sequences[topic] += 1
        if self._link.client is None:
            self.lost += 1
            return
        try:
            self._outbox.put_nowait((self._subject(topic), self._frame(topic, number, payload)))
        except asyncio.QueueFull:
            self.lost += 1

    def subscribe(self, topic: str) -> AsyncIterator[PlaneMessage]:
        """Receive from now on what others publish on a topic; call it with the event loop running."""
        self._start()
        queue: asyncio.Queue[PlaneMessage | None] = asyncio.Queue()
        if topic not in self._queues:

            async def heard(message: "Msg") -> None:
                self._heard(topic, message.data)

            self._listening.add(asyncio.create_task(self._link.listen(self._subject(topic), heard)))
        self._queues.setdefault(topic, set()).add(queue)
        return self._messages(topic, queue)

    async def close(self) -> None:
        """Send what is left and leave the broker; subscriptions end."""
        if self._closed:
            return
        if self._link.client is not None and self._sending is not None:
            try:
                await asyncio.wait_for(self._outbox.join(), 1.0)
            except TimeoutError:
                log.debug("%d messages were not sent", self._outbox.qsize())
        self._closed = True
        for queues in self._queues.values():
            for queue in queues:
                queue.put_nowait(None)
        await end([task for task in (self._sending, *self._listening) if task is not None])
        await self._link.close()

    def _start(self) -> None:
        if self._sending is None:
            self._link.start()
            self._sending = asyncio.create_task(self._send_all(), name="nats plane")

    async def _send_all(self) -> None:
        while True:
            subject, frame = await self._outbox.get()
            if not await self._link.publish(subject, frame):
                self.lost += 1
            self._outbox.task_done()

    async def _messages(self, topic: str, queue: "asyncio.Queue[PlaneMessage | None]") -> AsyncIterator[PlaneMessage]:
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.get(topic, set()).discard(queue)

    def _subject(self, topic: str) -> str:
        return f"{self._prefix}.plane.{subject_of(topic)}"

    def _frame(self, topic: str, number: int, payload: bytes) -> bytes:
        name = self.name.encode()
        head = VERSION.to_bytes(1, "big") + number.to_bytes(8, "big") + len(name).to_bytes(2, "big")
        frame = head + name + payload
        return frame if self._secret is None else self._code(self._secret, topic, frame) + frame

    def _code(self, secret: ClusterSecret, topic: str, frame: bytes) -> bytes:
        return secret.sign(_PURPOSE, topic.encode(), frame).encode()

    def _heard(self, topic: str, raw: bytes) -> None:
        message = self._message(topic, raw)
        if message is None or message.publisher == self.name:
            return
        for queue in self._queues.get(topic, ()):
            if queue.qsize() < self._limit:
                queue.put_nowait(message)
            else:
                self.lost += 1

    def _message(self, topic: str, raw: bytes) -> PlaneMessage | None:
        if self._secret is not None:
            code, raw = raw[:_CODE], raw[_CODE:]
            if not self._secret.verify(code.decode("ascii", "replace"), _PURPOSE, topic.encode(), raw):
                self.foreign += 1
                self._log_left_out(self.foreign, topic, "it is not signed with this cluster's secret")
                return None
        try:
            if not raw:
                raise ValueError("it is empty")
            refuse_newer(raw[0], VERSION, "a message of the event plane")
            end = _HEAD + int.from_bytes(raw[9:_HEAD], "big")
            if len(raw) < end:
                raise ValueError(f"it has {len(raw)} bytes")
            return PlaneMessage(raw[_HEAD:end].decode(), topic, int.from_bytes(raw[1:9], "big"), raw[end:])
        except NewerVersion as error:
            self.newer += 1
            self._log_left_out(self.newer, topic, str(error))
        except ValueError as error:
            self.malformed += 1
            self._log_left_out(self.malformed, topic, str(error))
        return None

    def _log_left_out(self, count: int, topic: str, why: str) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: a flood must not fill the log
            log.warning("message %d on %r left out: %s", count, topic, why)
