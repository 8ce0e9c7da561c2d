"""`StatsPublisher`: the PUB socket of a plug-in, which drops messages instead of delaying its engine."""

import logging
import threading

import msgspec
import zmq

from penstock.kernel.pass_report import PassReport

HWM = 4096
"""Messages kept for a slow subscriber; the next are dropped, and the numbers show it."""


class StatsPublisher:
    """Publish passes at one endpoint, from any thread.

    Raises:
        zmq.ZMQError: the endpoint can't be bound.
    Cost: about 15 us per pass, with a subscriber.
    """

    def __init__(self, endpoint: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        # A separate context: the engine ends its own one without notice to us.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        self._socket.sndhwm = HWM
        self._numbers = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        bound: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self.endpoint = bound.rstrip(b"\0").decode()

    def next_number(self) -> int:
        """Return the number of the next message, from 0 on."""
        with self._lock:
            number = self._numbers
            self._numbers += 1
            return number

    def publish(self, report: PassReport) -> None:
        """Send to all subscribers; never waits."""
        payload = self._encode(report)
        with self._lock:
            self._socket.send(payload, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        self._socket.close(0)
        self._context.term()


_open: dict[str, StatsPublisher] = {}
_opening = threading.Lock()


def publisher_at(endpoint: str, log: logging.Logger) -> StatsPublisher | None:
    """Return this process's publisher at an endpoint, or None where it can't be bound; that is logged, never raised.

    One engine process may load a plug-in once for each of its data-parallel ranks: they share the socket.
    """
    with _opening:
        publisher = _open.get(endpoint)
        if publisher is None:
            try:
                publisher = _open[endpoint] = StatsPublisher(endpoint)
            except zmq.ZMQError as error:
                log.warning("statistics stay off: %s can't be bound: %s", endpoint, error)
                return None
            log.info("statistics of every pass are published at %s", publisher.endpoint)
        return publisher
