"""One HTTP/1.1 connection to an engine: parses the arriving bytes and passes them on in the same callback.

A piece of a relayed answer goes from the socket to its receiver within one callback of the event loop: no task is woken
for it. The rarer waits (for the head, a whole body, the end) are on one future.
"""

import asyncio
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Literal

import httptools

from penstock.adapters.engines.http.engine_call import ANSWER_MAX, EngineBroken, EngineUnreachable, Feed, ResponseSink
from penstock.adapters.http1_connection import HEAD_MAX, HOST_LOST, LOST_AFTER, Http1Connection, probe_host

BUFFERED_MAX = 256 * 1024
"""Bytes of a body without a receiver, above which no more are read."""
RETRY_AFTER_MAX = 86_400.0
"""Most seconds of a Retry-After that are passed on: an engine that names more has written nonsense."""

Wanted = Literal["head", "piece", "whole", "end"]


class ConnectionClosed(EngineUnreachable):
    """A connection was closed before the first byte of an answer."""


class EngineConnection(Http1Connection):
    """One connection, and the answer that is on it.

    Args:
        lost: called once when the connection is gone.
    """

    __slots__ = (
        "_buffered",
        "_extra",
        "_feed",
        "_head_size",
        "_headers",
        "_interim",
        "_lost",
        "_parser",
        "_parts",
        "_reusable",
        "_sink",
        "_until_eof",
        "_wanted",
        "begun",
        "busy",
        "complete",
        "content_type",
        "error",
        "on_body",
        "retry_after",
        "status",
        "used",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, lost: Callable[["EngineConnection"], None]) -> None:
        super().__init__(loop)
        self._lost = lost
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        """What the parser calls for each piece: the list's own method, so that none of ours runs for it."""
        self._parser = httptools.HttpResponseParser(self)
        self._wanted: Wanted = "head"
        self._feed: Feed | None = None
        self._sink: ResponseSink | None = None
        self.busy = False
        self.used = False
        """Whether the connection carried an answer before: then the engine may have closed it meanwhile."""
        self._clear()

    def _clear(self) -> None:
        self._buffered = 0
        """Bytes that came while nothing was relayed: the body's, and a little of its framing."""
        self._head_size = 0
        self._headers: dict[bytes, bytes] = {}
        self._interim = False
        self._until_eof = False
        self._reusable = False
        self._extra = False
        self.begun = False
        """Whether the answer's head is here."""
        self.complete = False
        self.error: Exception | None = None
        self.status = 0
        self.content_type = ""
        self.retry_after: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        probe_host(transport.get_extra_info("socket"))

    # --- calls from `Http1Call` -------------------------------------------------------------------------------------

    def request(self, head: bytes, body: bytes) -> None:
        """Send a request; the connection is busy until `finish`."""
        self._clear()
        self.busy = True
        if self.closed:
            self.error = ConnectionClosed("the connection was closed")
        else:
            self.send(head, body)

    def wait(self, wanted: Wanted, feed: Feed | None = None, sink: ResponseSink | None = None) -> asyncio.Future[bool]:
        """Return a future, done when the head, a piece, the whole body or the end is here, or the answer broke.

        Args:
            feed: pieces are passed to it meanwhile; done with False where ``sink`` is full and reading has stopped.
        """
        self._wanted, self._feed, self._sink = wanted, feed, sink
        if self._paused:
            self.resume()
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def take(self) -> bytes:
        """Return what has arrived and was not taken yet."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._buffered = 0
        return data

    def interrupt(self, error: Exception) -> None:
        """Make the waiting task raise; nothing is relayed any more."""
        self._feed = None
        self._wake(error=error)

    def finish(self) -> bool:
        """End the answer; return whether the connection can carry another one. If not, it is closed."""
        self._feed = self._sink = self._waiter = None
        self._parts.clear()
        self._headers = {}
        self.busy = False
        self.used = True
        if (
            self.complete
            and self._reusable
            and self.error is None
            and not self._extra
            and not self.closed
            and not self.transport.get_write_buffer_size()  # the engine answered before it had read everything
        ):
            if self._paused:
                self.resume()
            return True
        self.abort()
        return False

    # --- callbacks of the event loop --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            self.abort()  # there is no request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(EngineBroken(f"the answer is not valid HTTP: {error.__context__ or error}"))
        except httptools.HttpParserUpgrade:
            self._fail(EngineBroken("the engine wants to speak another protocol"))
        feed = self._feed
        if feed is not None:
            parts, more = self._parts, True
            if parts:
                piece = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                try:
                    more = feed(piece)
                except Exception as error:  # noqa: BLE001 - the task that relays is its boundary: it raises this
                    self.interrupt(error)
                    return
                if more and self._sink is not None and self._sink.full and self._feed is not None:
                    self.pause()
                    self._over(False)
            if not more or self.complete or self.error is not None:
                self._over()
            return
        if not self.begun:
            self._head_size += len(data)
            if self._head_size > HEAD_MAX:
                self._fail(EngineBroken(f"the answer's head has more than {HEAD_MAX} bytes"))
        wanted = self._wanted
        if (
            self.complete
            or self.error is not None
            or (wanted == "head" and self.begun)
            or (wanted == "piece" and self._parts)
        ):
            self._over()
        self._buffered += len(data)
        if wanted == "whole" and self._waiter is not None:
            if self._buffered > ANSWER_MAX + 2 * HEAD_MAX:
                self._fail(EngineBroken(f"the answer has more than {ANSWER_MAX} bytes"))
                self._over()
        elif self._buffered > BUFFERED_MAX:
            self.pause()

    def eof_received(self) -> None:
        if self._until_eof and self.begun:
            self.complete = True

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self.busy and not self.complete and self.error is None:
            lost = isinstance(error, OSError) and error.errno in HOST_LOST
            if lost:
                reason = f"no packet of the engine's host for {LOST_AFTER} s ({error})"
            else:
                reason = "the engine closed the connection" if error is None else f"{type(error).__name__}: {error}"
            broken = lost or self.begun or self._head_size > 0
            self.error = EngineBroken(f"the answer broke off: {reason}") if broken else ConnectionClosed(reason)
        self._over()
        self._lost(self)

    # --- callbacks of the parser ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self._extra = True
            raise ValueError("a second answer to one request")  # no byte of it may follow the first

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.begun:  # a trailer; it is not passed on, only limited
            self._head_size += len(name) + len(value)
            if self._head_size > 2 * HEAD_MAX:
                raise ValueError(f"more than {HEAD_MAX} bytes of trailers")
        else:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, {}
        if status < 200:
            self._interim = True
            return
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ValueError("its body is compressed, which was not asked for")
        self.status = status
        self.content_type = headers.get(b"content-type", b"application/json").decode("utf-8", "surrogateescape")
        after = headers.get(b"retry-after")
        self.retry_after = None if after is None else _seconds_until(after.decode("latin-1"))
        self._reusable = self._parser.should_keep_alive()
        # Without a length the connection's end is the body's; the parser reports only that it can't be kept.
        chunked = headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        self._until_eof = not chunked and b"content-length" not in headers
        self.begun = True

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self.complete = True

    # --- inside -----------------------------------------------------------------------------------------------------

    def _over(self, ended: bool = True) -> None:
        """End the present wait; nothing is relayed until the next one."""
        self._feed = None
        self._wake(ended)

    def _fail(self, error: Exception) -> None:
        """The engine is at fault: nothing more of this connection is used."""
        if self.error is None and not self.complete:
            self.error = error
        self._extra = True
        self.abort()


def _seconds_until(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After, which may be a date; None where it is neither."""
    try:
        after = float(retry_after)  # not only whole ones are sent
    except ValueError:
        try:
            after = max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
        except ValueError:
            return None
    return min(after, RETRY_AFTER_MAX) if after >= 0 else None
