"""ZMQ forwarder: passes events between processes that can't reach each other through one that all can reach.

Frames pass as they are, with their publishers' names and sequence numbers: what the forwarder loses shows as a gap.
"""

import threading

import zmq

from penstock.adapters.planes.zmq_plane import MESSAGE_LIMIT, ZmqPlane
from penstock.adapters.zmq_curve import bind_side, connect_side
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret


class Forwarder:
    """Carries what is published at one endpoint to all subscribers at the other, in a thread of its own.

    Args:
        publish, subscribe: endpoints to bind; a port of 0 takes any free one.
        limit: messages kept for each listener; a slower one loses some.
        secret: of the cluster; None speaks plain.
    Raises:
        ConfigError: an endpoint can't be bound.
    """

    def __init__(
        self, publish: str, subscribe: str, *, limit: int = 100_000, secret: ClusterSecret | None = None
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inward, self._outward = self._context.socket(zmq.XSUB), self._context.socket(zmq.XPUB)
        self._inward.rcvhwm = self._outward.sndhwm = limit
        self._inward.maxmsgsize = MESSAGE_LIMIT
        self._control, self._control_peer = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._control.bind("inproc://control")
        self._control_peer.connect("inproc://control")
        self.publish_endpoint = _bind_forwarder_socket(self._inward, publish, secret)
        self.subscribe_endpoint = _bind_forwarder_socket(self._outward, subscribe, secret)
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)

    def start(self) -> "Forwarder":
        """Forward from now on."""
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most ``timeout`` seconds; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End it; what it has not passed on is lost."""
        self._control.send(b"TERMINATE")
        self._thread.join()
        for socket in (self._inward, self._outward, self._control, self._control_peer):
            socket.close(0)
        self._context.term()

    def _run(self) -> None:
        zmq.proxy_steerable(self._inward, self._outward, None, self._control_peer)


class ForwardedPlane(ZmqPlane):
    """An `EventPlane` through a `Forwarder`; it connects to no other process.

    Args:
        name: publisher's name, unlike all others'.
        publish, subscribe: the forwarder's endpoints.
        limit, secret: as those of `ZmqPlane`.
    """

    def __init__(
        self, name: str, publish: str, subscribe: str, *, limit: int = 10_000, secret: ClusterSecret | None = None
    ) -> None:
        self._publish_endpoint = publish
        super().__init__(name, limit=limit, secret=secret)
        self._peers.add(subscribe)

    async def connect(self, endpoint: str) -> None:
        """Do nothing: the forwarder passes the messages of all its users."""

    async def disconnect(self, endpoint: str) -> None:
        """Do nothing."""

    def _watch_publishing(self) -> None:
        self.others.watch(self._pub)  # here the publishing side connects as well

    def _open(self, host: str) -> str:
        connect_side(self._pub, self._secret)
        self._pub.reconnect_ivl_max = 2_000
        self._pub.connect(self._publish_endpoint)
        return ""


def _bind_forwarder_socket(socket: "zmq.Socket[bytes]", endpoint: str, secret: ClusterSecret | None) -> str:
    socket.linger = 0
    bind_side(socket, secret)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint} can't be bound: {error}", hint="see discovery.forwarder") from error
    bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return bound.rstrip(b"\0").decode()
