"""Listener of the hand-written server: accepts connections, and closes those that pass their deadline."""

import asyncio
import socket
import ssl
from collections.abc import Sequence

from penstock.frontend.http.http1_server import ClientConnection, ListenerState

SWEEP_EVERY = 0.5
"""Seconds between sweeps for connections whose deadline has passed: one timer for all of them."""


class Http1Listener:
    """One listening address and its connections."""

    def __init__(self, state: ListenerState) -> None:
        self.state = state
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> set[ClientConnection]:
        return self.state.connections

    async def start(self, sockets: Sequence[socket.socket], *, tls: ssl.SSLContext | None, backlog: int) -> None:
        """Accept connections of bound sockets."""
        for bound in sockets:
            loop = self.state.loop
            create = loop.create_unix_server if bound.family == socket.AF_UNIX else loop.create_server
            server = await create(self.connection, sock=bound, ssl=tls, backlog=backlog)
            self._servers.append(server)
        self._sweeper = self.state.loop.call_later(SWEEP_EVERY, self._sweep)

    def connection(self) -> ClientConnection:
        """Make the protocol object of one connection."""
        return ClientConnection(self.state)

    def stop_accepting(self) -> None:
        """Take no new connections; those that are open stay."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def drain(self) -> None:
        """Take no new connections; close idle ones at once, and the others after their answer."""
        self.state.draining = True
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
        now = self.state.loop.time()
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            connection.overdue()
        self._sweeper = self.state.loop.call_later(SWEEP_EVERY, self._sweep)
