"""`EngineCall`: the seam between the life of a request and the HTTP client that carries it to an engine.

It passes bytes; the frontend interprets them. Closing a call before its answer's end closes the
connection, which is how engines of the OpenAI dialect learn that a request is to be aborted.

`penstock.adapters.engines.http.http1_client` implements it, written by hand for speed; a client over aiohttp is its
oracle in the tests.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.kernel.errors import EngineError

ANSWER_MAX = 256 * 1024 * 1024
"""Most bytes of an unary answer that are held."""
COMMAND_MAX = 1024 * 1024
"""Most bytes of a command's answer that are read."""
CONNECTIONS_MAX = 4096
"""Connections to one engine; a call above that waits for one. As many as a frontend holds requests by default."""

Feed = Callable[[bytes], bool]
"""Takes a piece of an answer's body at once; returns False to get no more."""


class EngineUnreachable(EngineError):
    """No answer began: the engine could not be connected to, or hung up before its first byte."""


class ConnectFailed(EngineUnreachable):
    """No connection came about, so the engine never had the request."""


class EngineSilent(EngineUnreachable):
    """A connection came about, and no answer came on it in time."""


class EngineBroken(EngineError):
    """The answer broke off after it had begun."""


class CallStopped(EngineError):
    """We stopped the call ourselves; the message says why."""


class ResponseSink(Protocol):
    """Where a relayed answer goes, as far as flow control is concerned."""

    @property
    def full(self) -> bool:
        """Whether too many bytes wait in the sink; then read no more until `drained`."""
        ...

    async def drained(self) -> None:
        """Wait until it takes more.

        Raises:
            ConnectionResetError: the receiver is gone.
        """
        ...


class EngineCall(Protocol):
    """One request to one engine. ``begin`` first; then ``next``, ``read`` or ``relay``; ``close`` always.

    A method that waits raises `CallStopped` once `stop` was called, `EngineUnreachable` or `EngineBroken` where the
    engine is at fault.
    """

    status: int
    content_type: str

    @property
    def streams(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        ...

    @property
    def retry_after(self) -> float | None:
        """Seconds of the engine's Retry-After, where it sent one."""
        ...

    async def begin(self) -> None:
        """Send the request, and return when the answer's status and headers are here.

        Where a kept connection turns out to be closed, one fresh connection is tried.
        """
        ...

    async def next(self) -> bytes:
        """Return what has arrived since the last call, waiting for at least one byte; b"" at the end."""
        ...

    async def read(self) -> bytes:
        """Return the whole body, at most `ANSWER_MAX` bytes."""
        ...

    async def relay(self, feed: Feed, sink: ResponseSink) -> None:
        """Hand every piece to ``feed`` as it arrives, until the end or until it returns False.

        An error of ``feed`` is raised again. It stops reading while ``sink`` is full.
        """
        ...

    def stop(self, reason: str) -> None:
        """Make the waiting method raise `CallStopped`, now or at its next wait; the first reason counts."""
        ...

    def close(self, *, lingers: bool = False) -> None:
        """End the call: a whole answer's connection is kept for the next call, an unfinished one is closed at once.

        Args:
            lingers: only the end of the body is missing: the connection is kept, too, where that comes soon.
        """
        ...


class EngineCalls(Protocol):
    """Connections to all engines of a frontend, kept alive between requests."""

    def call(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> EngineCall:
        """Return a POST that has not been sent yet."""
        ...

    async def command(
        self, url: str, path: str, timeout: float, method: str = "POST", most: int = COMMAND_MAX
    ) -> tuple[int, bytes]:
        """Return status and body (at most ``most`` bytes) of a request without a body, such as a cache's reset.

        Raises:
            EngineUnreachable: no whole answer within ``timeout`` seconds.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
