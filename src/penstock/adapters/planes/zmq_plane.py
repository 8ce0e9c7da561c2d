"""ZMQ event plane: messages between Penstock's processes over loopback or a trusted network, without a broker.

Each process binds one PUB socket and connects to those of the others; the caller learns their endpoints elsewhere (from
the store) and passes them to `connect` and `disconnect`. A message is ``[topic, publisher, version u8 and sequence u64
big-endian, payload]``. With the cluster's secret the sockets speak CURVE: a process without it neither receives nor is
received.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from penstock.adapters.seams import PlaneMessage
from penstock.adapters.zmq_curve import Handshakes, bind_side, connect_side
from penstock.adapters.zmq_receive import awaited_socket, receive, shared_context
from penstock.kernel.message_version import NewerVersion, refuse_newer
from penstock.kernel.secret import ClusterSecret

log = logging.getLogger(__name__)

VERSION = 1
"""Of the frames around a payload; it grows only where an older reader would misunderstand them."""
MESSAGE_LIMIT = 16 << 20
"""Bytes of one message; a larger one drops the connection, which is made again."""
_HEAD = VERSION.to_bytes(1, "big")
_BREATH = 64
"""Messages yielded without waiting before other tasks get a turn."""


class ZmqPlane:
    """An `EventPlane` over ZeroMQ.

    Args:
        name: publisher's name, unlike all others'.
        host: address to bind; without a secret only trusted processes may be able to reach it.
        limit: messages kept per subscriber; beyond it they are lost, as the gap in ``sequence`` shows.
        secret: of the cluster; None speaks plain, and then nothing here authenticates.
    """

    def __init__(
        self, name: str, host: str = "127.0.0.1", limit: int = 10_000, secret: ClusterSecret | None = None
    ) -> None:
        self.name = name
        self.malformed = 0
        self.newer = 0
        """Messages left out because their version is above ours."""
        self.others = Handshakes(self._refused)
        """Handshakes with the processes that this one connects to."""
        self.strangers = Handshakes(self._stranger)
        """Handshakes with the processes that connect to this one."""
        self._secret = secret
        self._name = name.encode()
        self._limit = limit
        self._sequences: Counter[str] = Counter()
        self._peers: set[str] = set()
        self._subscriptions: set[zmq.asyncio.Socket] = set()
        self._pub = shared_context().socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = limit
        self._watched = False
        self.endpoint = self._open(host)
        """The endpoint that others connect to."""

    async def connect(self, endpoint: str) -> None:
        """Receive from another process from now on; the connection is made again by itself when it breaks."""
        if endpoint in self._peers or endpoint == self.endpoint:
            return
        self._peers.add(endpoint)
        for socket in self._subscriptions:
            socket.connect(endpoint)

    async def disconnect(self, endpoint: str) -> None:
        """Receive from it no longer; an endpoint that was never connected is no error."""
        if endpoint in self._peers:
            self._peers.discard(endpoint)
            for socket in self._subscriptions:
                socket.disconnect(endpoint)

    async def publish(self, topic: str, payload: bytes) -> None:
        """Send to all present subscribers. Never waits: a subscriber that is too slow loses the message."""
        self.send(topic, payload)

    def send(self, topic: str, payload: bytes) -> None:
        """Do the same from a plain function; a plane that is closed sends nothing."""
        if self._pub.closed:
            return
        number = self._sequences[topic]
        self._sequences[topic] += 1
        frames = (topic.encode(), self._name, _HEAD + number.to_bytes(8, "big"), payload)
        self._pub.send_multipart(frames, zmq.NOBLOCK)

    def subscribe(self, topic: str) -> AsyncIterator[PlaneMessage]:
        """Receive from now on what others publish on a topic; call it with the event loop running."""
        socket = awaited_socket(zmq.SUB, self._limit, MESSAGE_LIMIT)
        socket.reconnect_ivl_max = 2_000
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        connect_side(socket, self._secret)
        self.others.watch(socket)
        if not self._watched:
            self._watched = True
            self._watch_publishing()
        for endpoint in self._peers:
            socket.connect(endpoint)
        self._subscriptions.add(socket)
        return self._messages(topic, socket)

    async def close(self) -> None:
        """Close all sockets; subscriptions end."""
        for socket in tuple(self._subscriptions):
            self._release(socket)
        self.strangers.close()
        self._pub.close(0)

    def _watch_publishing(self) -> None:
        self.strangers.watch(self._pub)

    def _open(self, host: str) -> str:
        """Bind the publishing socket; return its endpoint."""
        bind_side(self._pub, self._secret)
        self._pub.bind(f"tcp://{host}:0")
        bound: bytes = self._pub.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return bound.rstrip(b"\0").decode()

    async def _messages(self, topic: str, socket: zmq.asyncio.Socket) -> AsyncIterator[PlaneMessage]:
        wanted = topic.encode()
        count = 0
        try:
            while (frames := await receive(socket)) is not None:
                message = self._message(topic, wanted, frames)
                if message is not None and message.publisher != self.name:
                    yield message
                count += 1
                if count % _BREATH == 0:
                    await asyncio.sleep(0)  # a waiting message returns at once, and other tasks would starve
        finally:
            self._release(socket)

    def _message(self, topic: str, wanted: bytes, frames: list[bytes]) -> PlaneMessage | None:
        if frames and frames[0] != wanted and frames[0].startswith(wanted):
            return None  # ZeroMQ subscribes by prefix; this is another topic
        try:
            if len(frames) < 3 or not frames[2]:
                raise ValueError(f"{len(frames)} frames")
            refuse_newer(frames[2][0], VERSION, f"a message of {frames[1][:100]!r}")
            if len(frames) != 4 or len(frames[2]) != 9:
                raise ValueError(f"{len(frames)} frames")
            return PlaneMessage(frames[1].decode(), topic, int.from_bytes(frames[2][1:], "big"), frames[3])
        except NewerVersion as error:
            self.newer += 1
            self._log_left_out(self.newer, topic, error)
        except ValueError as error:
            self.malformed += 1
            self._log_left_out(self.malformed, topic, error)
        return None

    def _log_left_out(self, count: int, topic: str, error: Exception) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: a flood must not fill the log
            log.warning("message %d on %r left out: %s", count, topic, error)

    def _refused(self, endpoint: str) -> None:
        log.warning("the event plane at %s refuses us: it has another cluster secret, or none", endpoint)

    def _stranger(self, endpoint: str) -> None:
        log.warning(
            "a process without this cluster's secret tries to connect to our event plane %s and is refused", endpoint
        )

    def _release(self, socket: zmq.asyncio.Socket) -> None:
        self._subscriptions.discard(socket)
        self.others.forget(socket)
        if not socket.closed:
            socket.close(0)
