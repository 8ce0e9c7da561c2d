"""Probes by which the system notices that a connection's other host is gone: one without power closes nothing.

A host that is there answers them however busy or stuck its engine is. A shorter break of a network is bridged by
packets that are sent again.
"""

import errno
import socket

FIRST_AFTER, EVERY, UNANSWERED = 4, 2, 3
"""Seconds of silence before the first probe and between two; how many without an answer end the connection."""
LOST_AFTER = FIRST_AFTER + EVERY * UNANSWERED
"""Seconds without any packet of the other host after which the system ends a connection."""
HOST_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""With which of these it does."""
_OPTIONS = {
    "TCP_KEEPIDLE": FIRST_AFTER,
    "TCP_KEEPINTVL": EVERY,
    "TCP_KEEPCNT": UNANSWERED,
    "TCP_USER_TIMEOUT": 1000 * LOST_AFTER,  # milliseconds: of what was sent and not acknowledged, which is not probed
}


def probe_host(connected: socket.socket) -> None:
    """Have the system probe the other host of a connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):  # else it is not Linux, whose own limits are longer
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
