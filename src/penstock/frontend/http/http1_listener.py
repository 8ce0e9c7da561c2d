"""Listener of the hand-written server: accepts connections, and closes those that pass their deadline."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.frontend.app import KEEP_ALIVE, LINGER
from penstock.frontend.http.http1_server import ClientConnection
from penstock.frontend.http.request_guard import Handler
from penstock.frontend.service import Service

SWEEP_EVERY = 0.5
"""Seconds between sweeps for connections whose deadline has passed: one timer for all of them."""


class Http1Listener:
    """One listening address and its connections.

    Args:
        handlers: path -> the handler of POST.
        plain: makes the protocol object of the plain server, which gets every other request's connection.
    """

    def __init__(
        self,
        service: Service,
        handlers: Mapping[str, Handler],
        plain: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        frontend = service.settings.frontend
        self.service = service
        self.handlers = handlers
        self.plain = plain
        self.loop = loop
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.body_max = frontend.limits.body_max
        self.keep_alive = KEEP_ALIVE
        self.linger = LINGER
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, sockets: Sequence[socket.socket], *, tls: ssl.SSLContext | None, backlog: int) -> None:
        """Accept connections of bound sockets."""
        for bound in sockets:
            server = await self.loop.create_server(self.connection, sock=bound, ssl=tls, backlog=backlog)
            self._servers.append(server)
        self._sweeper = self.loop.call_later(SWEEP_EVERY, self._sweep)

    def connection(self) -> ClientConnection:
        """Make the protocol object of one connection."""
        return ClientConnection(self)

    @property
    def stall_timeout(self) -> float:
        return self.service.settings.frontend.upstream.stall_timeout

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open stay."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def drain(self) -> None:
        """Take no new connections; close idle ones at once, and the others after their answer."""
        self.draining = True
        self.stop_accepting()
        for connection in list(self.connections):
            connection.close_idle()

    async def close(self) -> None:
        """Cut the remaining connections."""
        self.drain()
        if self._sweeper is not None:
            self._sweeper.cancel()
        left = list(self.connections)
        for connection in left:
            connection.abort()
        for connection in left:
            await connection.ended()

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            connection.overdue()
        self._sweeper = self.loop.call_later(SWEEP_EVERY, self._sweep)
