"""Hand-written HTTP/1.1 client of engines over the event loop's own protocols: the fast `EngineCalls`.

The fast implementation of `penstock.adapters.engines.http.engine_call`. llhttp parses the answers; pieces of a relayed
answer are passed on in the callback that brought them (`http1_client_connection`); connections are kept between calls
(`http1_client_pool`). What is rare (https, a URL with a user in it, small commands) goes to the plain client.
"""

import asyncio
import re
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from penstock.adapters.engines.http.aiohttp_client import AiohttpEngineClient
from penstock.adapters.engines.http.engine_call import (
    ANSWER_MAX,
    CONNECTIONS_MAX,
    CallStopped,
    EngineBroken,
    EngineCall,
    EngineCalls,
    EngineUnreachable,
    Feed,
    ResponseSink,
)
from penstock.adapters.engines.http.http1_client_connection import ConnectionClosed, EngineConnection
from penstock.adapters.engines.http.http1_client_pool import SWEEP_EVERY, ConnectionPool

T = TypeVar("T")
_TARGETS_MAX = 4096
"""Most (URL, path) pairs whose head is remembered."""
_PATH = re.compile(r"[!-~]*\Z")


def open_calls(fast: bool, *, connect_timeout: float = 5.0) -> EngineCalls:
    """Return the hand-written client, or the plain one."""
    plain = AiohttpEngineClient(connect_timeout=connect_timeout)
    if not fast:
        return plain
    return Http1Client(plain, connect_timeout=connect_timeout)


class Http1Client:
    """Connections to all engines of a frontend.

    Args:
        plain: the client for what is not on the hot path.
        connect_timeout: seconds.
        connections_max: connections to one engine; a call above that waits for one.
    """

    def __init__(
        self, plain: EngineCalls, *, connect_timeout: float = 5.0, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        self._plain = plain
        self._connect_timeout = connect_timeout
        self._connections_max = connections_max
        self._origins: dict[tuple[str, int], ConnectionPool] = {}
        self._targets: dict[tuple[str, str], tuple[ConnectionPool, str] | None] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def call(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> EngineCall:
        """Return a POST that has not been sent yet."""
        key = (url, path)
        try:
            target = self._targets[key]
        except KeyError:
            target = self._remember(key)
        if target is None:
            return self._plain.call(url, path, body, headers)
        return Http1Call(url, target[0], _head(target[1], headers, len(body)), body)

    async def get(self, url: str, path: str, timeout: float) -> tuple[int, bytes]:
        """Return status and body of a small GET."""
        return await self._plain.get(url, path, timeout)

    async def command(self, url: str, path: str, timeout: float) -> tuple[int, bytes]:
        """Return status and body of a small POST without a body."""
        return await self._plain.command(url, path, timeout)

    async def close(self) -> None:
        """Close all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for origin in self._origins.values():
            origin.close()
        self._targets.clear()
        self._origins.clear()
        await self._plain.close()

    def _remember(self, key: tuple[str, str]) -> tuple[ConnectionPool, str] | None:
        if len(self._targets) >= _TARGETS_MAX:
            self._targets.clear()
        parts = _split(*key)
        if parts is None:
            self._targets[key] = None
            return None
        host, port, head = parts
        origin = self._origins.get((host, port))
        if origin is None:
            origin = ConnectionPool(host, port, self._connect_timeout, self._connections_max)
            self._origins[host, port] = origin
        self._targets[key] = origin, head
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_EVERY, self._sweep)
        return origin, head

    def _sweep(self) -> None:
        """Close what is idle; forget engines that have gone, so that years of them do not gather."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, origin in list(self._origins.items()):
            origin.sweep(now)
            if origin.unused:
                del self._origins[key]
                self._targets = {name: target for name, target in self._targets.items() if not _of(target, origin)}
        self._sweeper = loop.call_later(SWEEP_EVERY, self._sweep) if self._origins else None


class Http1Call:
    """One POST (`EngineCall`)."""

    __slots__ = ("_body", "_connection", "_head", "_origin", "_side", "_stopped", "_url", "content_type", "status")

    def __init__(self, url: str, origin: ConnectionPool, head: bytes, body: bytes) -> None:
        self.status = 0
        self.content_type = ""
        self._url = url
        self._origin = origin
        self._head = head
        self._body = body
        self._connection: EngineConnection | None = None
        self._stopped: str | None = None
        self._side: asyncio.Task[Any] | None = None
        """The wait that is not on the connection: for a new connection, or for a sink."""

    @property
    def streams(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.content_type.startswith("text/event-stream")

    @property
    def retry_after(self) -> float | None:
        """Seconds of the engine's Retry-After, where that is a number."""
        return None if self._connection is None else self._connection.retry_after

    async def begin(self) -> None:
        """Send the request, and return when the answer's status and headers are here."""
        connection = self._origin.idle_connection(asyncio.get_running_loop().time())
        tries = 2
        while True:
            self._check()
            reused = connection is not None
            tries -= 1
            if connection is None:
                try:
                    connection = await self._interruptible(self._origin.fresh())
                except (OSError, TimeoutError, ValueError) as error:  # ValueError: no such host name
                    raise EngineUnreachable(f"no answer from {self._url}: {_described(error)}") from error
                reused = connection.used
            self._connection = connection
            connection.send(self._head, self._body)
            if connection.error is None:
                await connection.wait("head")
            if connection.begun:
                self.status, self.content_type = connection.status, connection.content_type
                self._body = b""  # may be large, and a stream lasts long
                return
            broken = connection.error or EngineBroken("the answer has no head")
            self.close()
            if not isinstance(broken, ConnectionClosed):
                raise broken
            if not reused or not tries:
                raise EngineUnreachable(f"no answer from {self._url}: {broken}")
            connection = None  # the engine closed an idle connection just then; nothing was lost

    async def next(self) -> bytes:
        """Return what has arrived since the last call, waiting for at least one byte; b"" at the end."""
        connection = self._answering()
        while True:
            self._check()
            data = connection.take()
            if data or connection.complete:
                return data
            if connection.error is not None:
                raise connection.error
            await connection.wait("piece")

    async def read(self) -> bytes:
        """Return the whole body, at most `ANSWER_MAX` bytes."""
        connection = self._answering()
        while not connection.complete:
            self._check()
            if connection.error is not None:
                raise connection.error
            await connection.wait("whole")
        self._check()
        body = connection.take()
        if len(body) > ANSWER_MAX:
            raise EngineBroken(f"the answer has more than {ANSWER_MAX} bytes")
        return body

    async def relay(self, feed: Feed, sink: ResponseSink) -> None:
        """Hand every piece to ``feed`` as it arrives, until the end or until it returns False."""
        connection = self._answering()
        while True:
            self._check()
            data = connection.take()
            if data and not feed(data):
                return
            if connection.complete:
                return
            if connection.error is not None:
                raise connection.error
            if sink.full:
                connection.pause()
                await self._interruptible(sink.drained())
            elif await connection.relay(feed, sink) and not connection.complete and connection.error is None:
                return

    def stop(self, reason: str) -> None:
        """Make the waiting method raise `CallStopped`, now or at its next wait; the first reason counts."""
        if self._stopped is None:
            self._stopped = reason
            if self._side is not None:
                self._side.cancel()
            elif self._connection is not None:
                self._connection.interrupt(CallStopped(reason))

    def close(self) -> None:
        """End the call: a whole answer's connection is kept for the next call, an unfinished one is closed at once."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.finish():
            self._origin.give_back(connection, asyncio.get_running_loop().time())

    def _answering(self) -> EngineConnection:
        if self._connection is None:
            raise RuntimeError("the call has no answer: begin it first, and close it last")
        return self._connection

    def _check(self) -> None:
        if self._stopped is not None:
            raise CallStopped(self._stopped)

    async def _interruptible(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Await work that `stop` can't interrupt through the connection."""
        side = asyncio.ensure_future(waiting)
        self._side = side
        try:
            return await side
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped is not None and task is not None and not task.cancelling():
                raise CallStopped(self._stopped) from None
            raise
        finally:
            self._side = None


def _split(url: str, path: str) -> tuple[str, int, str] | None:
    """Return host, port and the start of the head, or None where the plain client carries the call."""
    try:
        parts = urlsplit(url)
        port = 80 if parts.port is None else parts.port
    except ValueError:
        return None
    host = parts.hostname
    plain = parts.scheme == "http" and host and "@" not in parts.netloc and not parts.query and not parts.fragment
    if not plain or not host or not _PATH.match(parts.netloc) or not _PATH.match(parts.path + path):
        return None
    target = parts.path.rstrip("/") + path
    return host, port, f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept: */*\r\n"


def _head(start: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    text = f"{start}{lines}content-length: {length}\r\n\r\n"
    ends = len(headers) + 5
    if text.count("\n") != ends or text.count("\r") != ends or "\0" in text:
        raise ValueError("a header for an engine has a line break or a NUL in it")
    return text.encode("utf-8", "surrogateescape")


def _of(target: tuple[ConnectionPool, str] | None, origin: ConnectionPool) -> bool:
    return target is not None and target[0] is origin


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
