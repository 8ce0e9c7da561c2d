"""How is one request sent to one engine? A thin client of the OpenAI dialect over HTTP: start, stream, abort.

It passes bytes; what they mean is the frontend's business. Closing an answer before its end closes the connection,
which is how engines of this dialect learn that a request is to be aborted.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
from yarl import URL

from penstock.kernel.errors import EngineError

KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: below the 5 s after which common engine servers close theirs."""
ANSWER_MAX = 256 * 1024 * 1024
"""Most bytes of an unary answer that are held."""
_SLICE = 256 * 1024


class EngineUnreachable(EngineError):
    """No answer began: the engine could not be connected to, or hung up before its first byte."""


class EngineBroken(EngineError):
    """The answer broke off after it had begun."""


class EngineAnswer:
    """An answer whose status and headers are here and whose body is still coming."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")

    @property
    def streams(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.content_type.startswith("text/event-stream")

    @property
    def retry_after(self) -> float | None:
        """Seconds that the engine asks to wait, where it says a number."""
        value = self._response.headers.get("retry-after", "")
        return float(value) if value.isdigit() else None

    async def next(self) -> bytes:
        """Return what has arrived since the last call, waiting for at least one byte; b"" at the end.

        Raises:
            EngineBroken: the connection was lost before the end.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineBroken(f"the answer broke off: {describe(error)}") from error

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            EngineBroken: the connection was lost before the end, or the body has more than `ANSWER_MAX` bytes.
        """
        parts: list[bytes] = []
        size = 0
        while data := await self.next():
            parts.append(data)
            size += len(data)
            if size > ANSWER_MAX:
                raise EngineBroken(f"the answer has more than {ANSWER_MAX} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Let go: a whole answer's connection goes back to the pool, an unfinished one is closed at once."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class EngineClient:
    """Connections to all engines of a frontend, kept alive between requests.

    Args:
        connect_timeout: seconds.
        connections_max: connections to one engine; a request above that waits for one.
    """

    def __init__(self, *, connect_timeout: float = 5.0, connections_max: int = 4096) -> None:
        self._connect_timeout = connect_timeout
        self._connections_max = connections_max
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> EngineAnswer:
        """Send a request and return its answer as soon as the status line is here.

        Raises:
            EngineUnreachable: no answer began. Where a kept connection turned out to be closed, one fresh connection
                has been tried before.
        """
        seen = SimpleNamespace(reused=False)
        while True:
            try:
                response = await self._open().post(
                    URL(url.rstrip("/") + path, encoded=True),
                    data=body if len(body) <= _SLICE else _slices(body),
                    headers={**headers, "content-length": str(len(body))},
                    allow_redirects=False,
                    trace_request_ctx=seen,
                )
                return EngineAnswer(response)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: no URL
                hung_up = isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError))
                if seen.reused and hung_up:
                    seen.reused = False  # the engine closed an idle connection just then; nothing was lost
                    continue
                raise EngineUnreachable(f"no answer from {url}: {describe(error)}") from error

    async def get(self, url: str, path: str, timeout: float) -> tuple[int, bytes]:
        """Return status and body of a small GET.

        Raises:
            EngineUnreachable: no whole answer within ``timeout`` seconds.
        """
        return await self._small("GET", url, path, timeout)

    async def command(self, url: str, path: str, timeout: float) -> tuple[int, bytes]:
        """Return status and body of a small POST without a body, such as ``/reset_prefix_cache``.

        Raises:
            EngineUnreachable: no whole answer within ``timeout`` seconds.
        """
        return await self._small("POST", url, path, timeout)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _small(self, method: str, url: str, path: str, timeout: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout):
                async with self._open().request(method, url.rstrip("/") + path) as response:
                    return response.status, await response.content.read(1 << 20)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnreachable(f"no answer from {url}{path}: {describe(error)}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_reused)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=self._connections_max, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=30
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                # No Accept-Encoding: a compressed stream would have to be unpacked to be passed on.
                skip_auto_headers=("accept-encoding", "user-agent"),
                trace_configs=[trace],
            )
        return self._session


def describe(error: BaseException) -> str:
    """Put an exception's kind and text into a few words."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    """Hand a large body over in pieces, so that the event loop is never held by one of them."""
    for start in range(0, len(body), _SLICE):
        yield body[start : start + _SLICE]
