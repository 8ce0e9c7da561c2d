"""Connection pool of one engine address: hands out a kept connection, else a new one within the limit."""

import asyncio
import ssl
from collections import deque

from penstock.adapters.engines.http.http1_client_connection import EngineConnection

KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: below the 5 s after which common engine servers close theirs."""
LINGER = 1.0
"""Seconds within which an engine has to end the body of a whole answer: a later end costs it the connection."""
SWEEP_EVERY = 0.5
"""Seconds between searches for connections that have been idle for too long."""
CONNECT_SLICES = 20
"""Parts of the limit on a connect. Each begins once the loop has come to the end of the one before: where thousands of
requests at once keep the loop busy for seconds, a connect has as many turns of it as ever, and no engine is blamed."""
FORGOTTEN_AFTER = 120
"""Searches in a row without a connection after which an address is forgotten."""


class ConnectionPool:
    """The connections to one address.

    Args:
        tls: of an https address.
        connect_timeout: seconds, with the TLS handshake.
        connections_max: connections at the same time; a call above that waits until one is free.
        keep_alive: seconds that an idle connection is kept.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        connect_timeout: float,
        connections_max: int,
        keep_alive: float,
    ) -> None:
        self.open = 0
        """Connections that exist or are being made."""
        self._idle: list[EngineConnection] = []
        self._waiting: deque[asyncio.Future[EngineConnection | None]] = deque()
        self._host = host
        self._port = port
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._connections_max = connections_max
        self._keep_alive = keep_alive
        self._made: set[EngineConnection] = set()
        self._lingering: set[EngineConnection] = set()
        """Those whose answer is whole but for the end of its body."""
        self._sweeps_unused = 0

    @property
    def unused(self) -> bool:
        """Whether there has been no connection for some time."""
        return self._sweeps_unused > FORGOTTEN_AFTER

    def idle_connection(self, now: float) -> EngineConnection | None:
        """Return an idle connection, the one used last, or None."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.closed and now < connection.deadline:
                return connection
            connection.abort()
        return None

    async def fresh(self) -> EngineConnection:
        """Return a new connection, or, where there may be no more, one that another call has just finished with.

        Raises:
            OSError, TimeoutError: it can't be made.
        """
        if self.open >= self._connections_max:
            if self._idle:
                self._idle.pop().abort()  # this call gets its place when it is gone
            connection = await self._place()
            if connection is not None:
                return connection
        else:
            self.open += 1
        return await self._connect()

    def give_back(self, connection: EngineConnection, now: float) -> None:
        """Keep a connection whose answer is over for the next call, or give it to a waiting call at once."""
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(connection)
        else:
            connection.deadline = now + self._keep_alive
            self._idle.append(connection)

    def finish(self, connection: EngineConnection, *, lingers: bool = False) -> None:
        """Keep the connection of an answer that is over for the next call; close one whose answer is unfinished.

        Args:
            lingers: close it only where the end of its answer's body does not come soon.
        """
        now = asyncio.get_running_loop().time()
        if lingers and not connection.complete and connection.error is None:
            connection.deadline = now + LINGER
            self._lingering.add(connection)
            connection.wait("whole").add_done_callback(lambda _: self.finish(connection))
            return
        self._lingering.discard(connection)
        if connection.finish():
            self.give_back(connection, now)

    def sweep(self, now: float) -> None:
        """Close what has been idle, or has waited for its answer's end, for too long.

        The idle ones are in the order of their last use.
        """
        for connection in [connection for connection in self._lingering if now >= connection.deadline]:
            connection.abort()
        self._sweeps_unused = 0 if self.open else self._sweeps_unused + 1
        idle = self._idle
        count = 0
        while count < len(idle) and now >= idle[count].deadline:
            idle[count].abort()
            count += 1
        del idle[:count]

    def close(self) -> None:
        """Cut all connections."""
        for connection in list(self._made):
            connection.abort()
        self._idle.clear()

    async def _place(self) -> EngineConnection | None:
        """Wait for a free connection, or for None: the right to make one."""
        waiter: asyncio.Future[EngineConnection | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            elif waiter.result() is None:
                self._leave()
            else:
                loop = asyncio.get_running_loop()
                self.give_back(waiter.result(), loop.time())  # type: ignore[arg-type]
            raise

    async def _connect(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        # TCP_NODELAY is on without being asked for, in asyncio and in uvloop.
        connecting = asyncio.ensure_future(
            loop.create_connection(lambda: EngineConnection(loop, self._lost), self._host, self._port, ssl=self._tls)
        )
        try:
            for _ in range(CONNECT_SLICES):
                if (await asyncio.wait({connecting}, timeout=self._connect_timeout / CONNECT_SLICES))[0]:
                    _, connection = connecting.result()
                    break
            else:
                raise TimeoutError(f"no connection within {self._connect_timeout:g} s")
        except BaseException:
            if not connecting.cancel() and connecting.exception() is None:
                connecting.result()[1].abort()  # it came about just when nobody waited for it any more
            self._leave()
            raise
        self._made.add(connection)
        return connection

    def _lost(self, connection: EngineConnection) -> None:
        if connection in self._made:
            self._made.discard(connection)
            if connection in self._idle:
                self._idle.remove(connection)
            self._leave()

    def _leave(self) -> None:
        """A connection is gone or was not made: its place goes to the next waiting call."""
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(None)
        else:
            self.open -= 1

    def _next_waiter(self) -> asyncio.Future[EngineConnection | None] | None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                return waiter
        return None
