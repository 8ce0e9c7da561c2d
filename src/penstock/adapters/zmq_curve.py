"""CURVE security for ZeroMQ sockets between Penstock's processes, with keys derived from the cluster's secret.

All processes of a cluster derive the same two key pairs, one for binding and one for connecting. The public
keys are never sent or written down, so a handshake succeeds only between holders of the secret: CURVE needs the binding
side's public key to begin with. Stock engines speak plain; their sockets stay so.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from penstock.adapters.zmq_receive import MessageNotice, received, shared_context
from penstock.kernel.secret import ClusterSecret

MECHANISM = "curve"
"""The value by which a simulated engine reports that its event sockets speak CURVE."""

AnySocket = zmq.Socket[bytes] | zmq.asyncio.Socket

_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH

_BENIGN = 2
_numbers = itertools.count()


def bind_side(socket: AnySocket, secret: ClusterSecret | None) -> None:
    """Let only holders of the secret talk to a socket that is about to be bound; without a secret it stays plain."""
    if secret is not None:
        socket.curve_publickey, socket.curve_secretkey = _curve_key_pair(secret, "zmq bind")
        socket.curve_server = True


def connect_side(socket: AnySocket, secret: ClusterSecret | None) -> None:
    """Let a socket that is about to be connected talk only to holders of the secret; without one it stays plain."""
    if secret is not None:
        socket.curve_publickey, socket.curve_secretkey = _curve_key_pair(secret, "zmq connect")
        socket.curve_serverkey = _curve_key_pair(secret, "zmq bind")[0]


def _curve_key_pair(secret: ClusterSecret, purpose: str) -> tuple[bytes, bytes]:
    hidden = z85.encode(secret.derive(purpose))
    return zmq.curve_public(hidden), hidden


class Handshakes:
    """The results of the handshakes of some sockets.

    A handshake may break off because a process ended in its middle: only the third in a row counts.

    Args:
        refused: called with the endpoint at its first failure, to log it once.
        broken: called when a connection ends.
        joined: called when one is made.
    """

    def __init__(
        self,
        refused: Callable[[str], None],
        broken: Callable[[], None] = lambda: None,
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        self.failed = 0
        """Handshakes that failed: another secret, or one side speaks plain."""
        self.failing: set[str] = set()
        """Endpoints whose last handshake failed."""
        self._logged: set[str] = set()
        self._broken_off: Counter[str] = Counter()
        self._refused, self._broken, self._joined = refused, broken, joined
        self._watched: dict[AnySocket, tuple[zmq.Socket[bytes], MessageNotice]] = {}

    def watch(self, socket: AnySocket) -> None:
        """Follow a socket until `forget`; call this before the socket connects, with the event loop running."""
        address = f"inproc://penstock-handshakes-{next(_numbers)}"
        socket.monitor(address, _FAILED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        monitor = shared_context().socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0
        monitor.connect(address)
        self._watched[socket] = monitor, MessageNotice(monitor, partial(self._follow, monitor))

    def forget(self, socket: AnySocket) -> None:
        """Stop following a socket that is about to be closed; an unknown socket is no error."""
        watched = self._watched.pop(socket, None)
        if watched is None:
            return
        monitor, notice = watched
        # In this order: libzmq's own thread waits for ever to report an event to a monitor that was closed before.
        if not socket.closed:
            socket.disable_monitor()
        notice.close()
        monitor.close(0)

    def close(self) -> None:
        """Stop following all sockets."""
        for socket in tuple(self._watched):
            self.forget(socket)

    def _follow(self, monitor: "zmq.Socket[bytes]") -> None:
        while not monitor.closed and (frames := received(monitor)) is not None:
            event = parse_monitor_message(frames)
            endpoint = bytes(event["endpoint"]).decode("utf-8", "replace")
            if event["event"] == zmq.Event.DISCONNECTED:
                self._broken()
            elif event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.failing.discard(endpoint)
                self._broken_off.pop(endpoint, None)
                self._joined()
            elif event["event"] == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._broken_off[endpoint] += 1
                if self._broken_off[endpoint] > _BENIGN:
                    self._fail(endpoint)
            elif event["event"] & _FAILED:
                self._fail(endpoint)

    def _fail(self, endpoint: str) -> None:
        self.failed += 1
        self.failing.add(endpoint)
        if endpoint not in self._logged:
            self._logged.add(endpoint)
            self._refused(endpoint)
