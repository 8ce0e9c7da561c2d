"""Hand-written HTTP/1.1 client of engines over the event loop's own protocols, with TLS where a URL is https.

It implements `penstock.adapters.engines.http.engine_call`. llhttp parses the answers; pieces of a relayed answer are
passed on in the callback that brought them (`http1_client_connection`); connections are kept between calls
(`http1_client_pool`).
"""

import asyncio
import base64
import re
import ssl
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from penstock.adapters.engines.http.engine_access import OPEN, EngineAccess
from penstock.adapters.engines.http.engine_call import (
    ANSWER_MAX,
    COMMAND_MAX,
    CONNECTIONS_MAX,
    CallStopped,
    ConnectFailed,
    EngineBroken,
    EngineSilent,
    EngineUnreachable,
    Feed,
    ResponseSink,
)
from penstock.adapters.engines.http.http1_client_connection import ConnectionClosed, EngineConnection
from penstock.adapters.engines.http.http1_client_pool import KEEP_ALIVE, SWEEP_EVERY, ConnectionPool
from penstock.adapters.http1_connection import header_lines

T = TypeVar("T")
_TARGETS_MAX = 4096
"""Most (URL, path) pairs whose head is remembered."""
_VISIBLE = re.compile(r"[!-~]*\Z")


class _Target(NamedTuple):
    """Where a call goes, and the start of its head; no pool where the URL is none of an engine."""

    origin: ConnectionPool | None
    head: str


class Http1Client:
    """Connections to all engines of a frontend.

    Args:
        connect_timeout: seconds.
        connections_max: connections to one engine; a call above that waits for one.
        keep_alive: seconds that an idle connection is kept.
        tls: for https; None trusts the system's certificates.
        access: what a server asks for, by its URL; looked up when a route of it is first called.
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 5.0,
        connections_max: int = CONNECTIONS_MAX,
        keep_alive: float = KEEP_ALIVE,
        tls: ssl.SSLContext | None = None,
        access: Callable[[str], EngineAccess] = lambda url: OPEN,
    ) -> None:
        self._access = access
        self._connect_timeout = connect_timeout
        self._connections_max = connections_max
        self._keep_alive = keep_alive
        self._tls = tls
        self._origins: dict[tuple[str, int, bool], ConnectionPool] = {}
        self._targets: dict[tuple[str, str], _Target] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def call(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> "Http1Call":
        """Return a POST that has not been sent yet."""
        try:
            origin, start = self._targets[url, path]
        except KeyError:
            if len(self._targets) >= _TARGETS_MAX:
                self._targets.clear()
            origin, start = self._targets[url, path] = self._target(url, path, "POST")
        head = f"{start}{header_lines(headers)}content-length: {len(body)}\r\n\r\n"
        return Http1Call(url, origin, head.encode("utf-8", "surrogateescape"), body)

    async def command(
        self, url: str, path: str, timeout: float, method: str = "POST", most: int = COMMAND_MAX
    ) -> tuple[int, bytes]:
        """Return status and body of a small request without a body."""
        origin, start = self._target(url, path, method)
        call = Http1Call(url, origin, f"{start}content-length: 0\r\n\r\n".encode("utf-8", "surrogateescape"), b"")
        answer = bytearray()
        try:
            async with asyncio.timeout(timeout):
                await call.begin()
                while len(answer) < most and (data := await call.next()):
                    answer += data
        except TimeoutError as error:
            late = EngineSilent if call._connection is not None else EngineUnreachable
            raise late(f"no answer from {url}{path} within {timeout:g} s") from error
        except EngineBroken as error:
            raise EngineUnreachable(f"no answer from {url}{path}: {error}") from error
        finally:
            call.close()
        return call.status, bytes(answer[:most])

    async def close(self) -> None:
        """Close all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for origin in self._origins.values():
            origin.close()
        self._targets.clear()
        self._origins.clear()

    def _target(self, url: str, path: str, method: str) -> _Target:
        try:
            access = self._access(url)
            address, rest, login = _address_and_head(url, path)
        except ValueError:
            return _Target(None, "")
        head = f"{method} {rest}{header_lines(access.headers)}"
        if "authorization" not in access.headers:
            head += login
        return _Target(self._origins.get(address) or self._open(address, access.tls), head)

    def _open(self, address: tuple[str, int, bool], tls: ssl.SSLContext | None) -> ConnectionPool:
        host, port, secure = address
        if secure and tls is None:
            tls = self._tls = self._tls or ssl.create_default_context()
        limits = self._connect_timeout, self._connections_max, self._keep_alive
        origin = ConnectionPool(host, port, tls if secure else None, *limits)
        self._origins[address] = origin
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_EVERY, self._sweep)
        return origin

    def _sweep(self) -> None:
        """Close what is idle; forget engines that have gone, so that years of them do not gather."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, origin in list(self._origins.items()):
            origin.sweep(now)
            if origin.unused:
                del self._origins[key]
                self._targets = {name: target for name, target in self._targets.items() if target.origin is not origin}
        self._sweeper = loop.call_later(SWEEP_EVERY, self._sweep) if self._origins else None


class Http1Call:
    """One POST (`EngineCall`)."""

    __slots__ = (
        "_body",
        "_connection",
        "_head",
        "_origin",
        "_side",
        "_stopped",
        "_url",
        "content_type",
        "status",
        "streams",
    )

    def __init__(self, url: str, origin: ConnectionPool | None, head: bytes, body: bytes) -> None:
        self.status = 0
        self.content_type = ""
        self.streams = False
        """Whether the body is a stream of server-sent events."""
        self._url = url
        self._origin = origin
        self._head = head
        self._body = body
        self._connection: EngineConnection | None = None
        self._stopped: str | None = None
        self._side: asyncio.Task[Any] | None = None
        """The wait that is not on the connection: for a new connection, or for a sink."""

    @property
    def retry_after(self) -> float | None:
        """Seconds of the engine's Retry-After, where it sent one."""
        return None if self._connection is None else self._connection.retry_after

    async def begin(self) -> None:
        """Send the request, and return when the answer's status and headers are here."""
        origin = self._origin
        if origin is None:
            raise ConnectFailed(f"no answer from {self._url}: this is not an http or https URL of an engine")
        connection = origin.idle_connection(asyncio.get_running_loop().time())
        tries = 2
        while True:
            if self._stopped is not None:
                raise CallStopped(self._stopped)
            reused = connection is not None
            tries -= 1
            if connection is None:
                try:
                    connection = await self._interruptible(origin.fresh())
                except (OSError, TimeoutError, ValueError) as error:  # ValueError: no such host name
                    raise ConnectFailed(f"no answer from {self._url}: {_error_description(error)}") from error
                reused = connection.used
            self._connection = connection
            connection.request(self._head, self._body)
            if connection.error is None:
                await connection.wait("head")
            if connection.begun:
                self.status, self.content_type = connection.status, connection.content_type
                self.streams = self.content_type.startswith("text/event-stream")
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
            if self._stopped is not None:
                raise CallStopped(self._stopped)
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
            if self._stopped is not None:
                raise CallStopped(self._stopped)
            if connection.error is not None:
                raise connection.error
            await connection.wait("whole")
        if self._stopped is not None:
            raise CallStopped(self._stopped)
        body = connection.take()
        if len(body) > ANSWER_MAX:
            raise EngineBroken(f"the answer has more than {ANSWER_MAX} bytes")
        return body

    async def relay(self, feed: Feed, sink: ResponseSink) -> None:
        """Hand every piece to ``feed`` as it arrives, until the end or until it returns False."""
        connection = self._answering()
        while True:
            if self._stopped is not None:
                raise CallStopped(self._stopped)
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
            elif await connection.wait("end", feed, sink) and connection.error is None:
                return

    def stop(self, reason: str) -> None:
        """Make the waiting method raise `CallStopped`, now or at its next wait; the first reason counts."""
        if self._stopped is None:
            self._stopped = reason
            if self._side is not None:
                self._side.cancel()
            elif self._connection is not None:
                self._connection.interrupt(CallStopped(reason))

    def close(self, *, lingers: bool = False) -> None:
        """End the call: a whole answer's connection is kept for the next call, an unfinished one is closed at once."""
        connection, self._connection = self._connection, None
        if connection is not None and self._origin is not None:
            self._origin.finish(connection, lingers=lingers)

    def _answering(self) -> EngineConnection:
        if self._connection is None:
            raise RuntimeError("the call has no answer: begin it first, and close it last")
        return self._connection

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


@lru_cache(maxsize=_TARGETS_MAX)
def _address_and_head(url: str, path: str) -> tuple[tuple[str, int, bool], str, str]:
    """Return the address (host, port, whether by TLS), the head after its method, and the header of the URL's user.

    Raises:
        ValueError: it is no http or https URL, or has a query, a fragment or what no request line may have.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    target = parts.path.rstrip("/") + path
    user, _, netloc = parts.netloc.rpartition("@")
    if (not secure and parts.scheme != "http") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(url)
    if not _VISIBLE.match(netloc) or not _VISIBLE.match(target):
        raise ValueError(url)
    login = f"authorization: Basic {base64.b64encode(unquote(user).encode()).decode()}\r\n" if user else ""
    port = parts.port if parts.port is not None else 443 if secure else 80
    return (parts.hostname, port, secure), f"{target} HTTP/1.1\r\nhost: {netloc}\r\naccept: */*\r\n", login


def _error_description(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
