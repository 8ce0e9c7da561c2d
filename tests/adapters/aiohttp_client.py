"""The oracle of the hand-written engine client: `EngineCalls` over aiohttp."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from penstock.adapters.engines.http.engine_call import (
    ANSWER_MAX,
    COMMAND_MAX,
    CONNECTIONS_MAX,
    CallStopped,
    EngineBroken,
    EngineUnreachable,
    Feed,
    ResponseSink,
)

KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: below the 5 s after which common engine servers close theirs."""
_SLICE = 256 * 1024

T = TypeVar("T")


class AiohttpCall:
    """An `EngineCall` over aiohttp."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        self.status = 0
        self.content_type = ""
        self._session = session
        self._url = url
        self._path = path
        self._body = body
        self._headers = headers
        self._response: aiohttp.ClientResponse | None = None
        self._reason: str | None = None
        self._scope: asyncio.Timeout | None = None

    @property
    def streams(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    @property
    def retry_after(self) -> float | None:
        value = "" if self._response is None else self._response.headers.get("retry-after", "")
        return float(value) if value.isdigit() else None

    async def begin(self) -> None:
        response = self._response = await self._stoppable(self._post)
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")

    async def next(self) -> bytes:
        return await self._stoppable(self._piece)

    async def read(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while data := await self.next():
            parts.append(data)
            size += len(data)
            if size > ANSWER_MAX:
                raise EngineBroken(f"the answer has more than {ANSWER_MAX} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def relay(self, feed: Feed, sink: ResponseSink) -> None:
        while data := await self.next():
            if not feed(data):
                return
            await sink.drained()

    def stop(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())

    def close(self, *, lingers: bool = False) -> None:
        if self._response is None:
            return
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    async def _stoppable(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await one operation; `stop` ends the wait."""
        if self._reason is not None:
            raise CallStopped(self._reason)
        try:
            async with asyncio.timeout(None) as self._scope:
                return await work()
        except TimeoutError:
            raise CallStopped(self._reason or "the call was given up") from None
        finally:
            self._scope = None

    async def _piece(self) -> bytes:
        assert self._response is not None
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineBroken(f"the answer broke off: {describe(error)}") from error

    async def _post(self) -> aiohttp.ClientResponse:
        trace = SimpleNamespace(reused=False)
        body = self._body
        while True:
            try:
                return await self._session.post(
                    URL(self._url.rstrip("/") + self._path, encoded=True),
                    data=body if len(body) <= _SLICE else _slices(body),
                    headers={**self._headers, "content-length": str(len(body))},
                    allow_redirects=False,
                    trace_request_ctx=trace,
                )
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: no URL
                hung_up = isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError))
                if trace.reused and hung_up:
                    trace.reused = False  # the engine closed an idle connection just then; nothing was lost
                    continue
                raise EngineUnreachable(f"no answer from {self._url}: {describe(error)}") from error


class AiohttpEngineClient:
    """`EngineCalls` over aiohttp.

    Args:
        connect_timeout: seconds.
        connections_max: connections to one engine; a request above that waits for one.
        tls: for https; None trusts the system's certificates.
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 5.0,
        connections_max: int = CONNECTIONS_MAX,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._connections_max = connections_max
        self._session: aiohttp.ClientSession | None = None

    def call(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> AiohttpCall:
        return AiohttpCall(self._open(), url, path, body, headers)

    async def command(
        self, url: str, path: str, timeout: float, method: str = "POST", most: int = COMMAND_MAX
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout):
                async with self._open().request(method, url.rstrip("/") + path) as response:
                    return response.status, await response.content.read(most)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnreachable(f"no answer from {url}{path}: {describe(error)}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_reused)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    limit_per_host=self._connections_max,
                    keepalive_timeout=KEEP_ALIVE,
                    ttl_dns_cache=30,
                    ssl=True if self._tls is None else self._tls,
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                # No Accept-Encoding: a compressed stream would have to be unpacked to be passed on.
                skip_auto_headers=("accept-encoding", "user-agent"),
                trace_configs=[trace],
            )
        return self._session


def describe(error: BaseException) -> str:
    """Describe an exception by its kind and text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    """Yield a large body in pieces, so that no single write blocks the event loop."""
    for start in range(0, len(body), _SLICE):
        yield body[start : start + _SLICE]
