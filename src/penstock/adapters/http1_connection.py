"""`Http1Connection`: what both ends of an HTTP/1.1 connection do: write, pause reading, wait for one thing, be cut.

`probe_host` has the system notice that the other host is gone: one without power closes nothing.
"""

import asyncio
import errno
import socket
from collections.abc import Mapping
from typing import Any

HEAD_MAX = 64 * 1024
"""Most bytes of a head."""
_JOINED_MAX = 64 * 1024
"""Largest body that is copied behind its head; a larger one is written separately."""
PROBES_AFTER, PROBE_EVERY, PROBES_UNANSWERED = 4, 2, 3
"""Seconds of silence before the first probe and between two; how many without an answer end the connection."""
LOST_AFTER = PROBES_AFTER + PROBE_EVERY * PROBES_UNANSWERED
"""Seconds without any packet of the other host after which the system ends a connection."""
HOST_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""With which of these it does."""
_OPTIONS = {
    "TCP_KEEPIDLE": PROBES_AFTER,
    "TCP_KEEPINTVL": PROBE_EVERY,
    "TCP_KEEPCNT": PROBES_UNANSWERED,
    "TCP_USER_TIMEOUT": 1000 * LOST_AFTER,  # milliseconds: of what was sent and not acknowledged, which is not probed
}


class Http1Connection(asyncio.Protocol):
    """One connection. Its side says in `data_received` and `connection_lost` what arriving bytes and the end mean."""

    __slots__ = ("_loop", "_paused", "_waiter", "closed", "deadline", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paused = False
        self._waiter: asyncio.Future[bool] | None = None
        """What the task of this connection waits for, until `_wake`; there is one at most."""
        self.transport: Any = None
        self.closed = False
        self.deadline = 0.0
        """Time of the loop at which the next sweep ends what the connection is doing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, head: bytes, body: bytes) -> None:
        """Write a whole message, in one packet where it is small."""
        if len(body) <= _JOINED_MAX:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def pause(self) -> None:
        """Read no more until `resume`."""
        if not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closed:
            self._paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        """Cut the connection at once."""
        if not self.closed and self.transport is not None:
            self.transport.abort()

    def _wake(self, value: bool = True, error: Exception | None = None) -> None:
        """End the present wait, if there is one."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(value)
        else:
            waiter.set_exception(error)


def header_lines(headers: Mapping[str, str]) -> str:
    """Write header lines, each with its end.

    Raises:
        ValueError: a header has a line break or a NUL in it.
    """
    lines = ""
    for name, value in headers.items():
        lines += f"{name}: {value}\r\n"
    count = len(headers)
    if lines.count("\n") != count or lines.count("\r") != count or "\0" in lines:
        raise ValueError("a header has a line break or a NUL in it")
    return lines


def probe_host(connected: socket.socket) -> None:
    """Have the system probe the other host of a connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # else it is not Linux, whose own limits are longer
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
