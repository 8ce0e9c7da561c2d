"""Hand-written HTTP/1.1 server: reads requests from a connection and answers them one at a time, in order, for speed.

Routed requests (`handlers`) are served here. Any other makes the connection the plain server's, from that request's
first byte on. A connection that waits for its next request holds no parser, no task and no timer.
"""

import asyncio
import enum
import logging
import math
from typing import TYPE_CHECKING, Any

from penstock.frontend.http import request_context
from penstock.frontend.http.error_responses import problem, rejected
from penstock.frontend.http.http1_body import ChunkedBody
from penstock.frontend.http.http1_exchange import Http1Exchange
from penstock.frontend.http.http1_head import END, HEAD_MAX, BadHead, HeadCheck, RequestHead, answer_head, read_head
from penstock.frontend.http.request_context import too_large
from penstock.frontend.http.request_guard import Handler, serve

if TYPE_CHECKING:
    from penstock.frontend.http.http1_listener import Http1Listener

log = logging.getLogger("penstock.frontend")

HEAD_TIMEOUT = 20.0
"""Seconds that a head has to arrive, from its first byte on."""
AHEAD_MAX = 64 * 1024
"""Bytes of following requests that are held while one is being answered; above it no more are read."""


class ConnectionState(enum.Enum):
    """What a connection is doing; in each but ANSWER it has a deadline."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    FLUSH = enum.auto()
    """The answer is written, and the client is still reading it."""
    DISCARD = enum.auto()
    """Further bytes are discarded, so that the client can read the answer before the connection ends."""
    CLOSING = enum.auto()


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_ahead",
        "_body",
        "_caller",
        "_check",
        "_chunked",
        "_drainers",
        "_expects",
        "_left",
        "_listener",
        "_parts",
        "_paused",
        "_refusal",
        "_state",
        "_task",
        "_waiter",
        "body_read",
        "closed",
        "deadline",
        "full",
        "keep_alive",
        "transport",
    )

    def __init__(self, listener: "Http1Listener") -> None:
        self._listener = listener
        self.transport: Any = None
        self.closed = False
        self.full = False
        """Whether the client reads more slowly than we write."""
        self.keep_alive = True
        self.body_read = True
        self.deadline = math.inf
        self._state = ConnectionState.IDLE
        self._ahead = b""
        """Bytes that are not parsed yet: a part of a head, or pipelined requests."""
        self._body = b""
        self._caller: Http1Exchange | None = None
        self._parts: list[bytes] | None = None
        self._left = 0
        self._expects = False
        self._check: HeadCheck | None = None
        self._chunked: ChunkedBody | None = None
        self._refusal: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drainers: list[asyncio.Future[None]] | None = None
        self._paused = False

    @property
    def idle(self) -> bool:
        """Whether no byte of a request has come since the last answer."""
        return self._state is ConnectionState.IDLE

    # --- callbacks of the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._listener.connections.add(self)
        self.deadline = self._listener.loop.time() + self._listener.keep_alive

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is ConnectionState.IDLE or state is ConnectionState.HEAD:
            self._read_head(data)
        elif state is ConnectionState.BODY:
            self._read_body(data)
        elif state is ConnectionState.ANSWER or state is ConnectionState.FLUSH:
            self._ahead += data
            if len(self._ahead) > AHEAD_MAX and not self._paused:
                self._paused = True
                self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.full = True
        if self._caller is not None:
            self._caller.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._caller is not None:
            self._caller.full = False
        self._wake_drainers(None)
        if self._state is ConnectionState.FLUSH:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._listener.connections.discard(self)
        self._wake_drainers(ConnectionResetError("the client is gone"))
        if self._task is not None:
            self._task.cancel()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        fresh = data
        if self._ahead:
            data = self._ahead + data
        if data[:1] in b"\r\n":
            data = data.lstrip(b"\r\n")
        end = data.find(END)
        try:
            if len(data) > HEAD_MAX and not 0 <= end <= HEAD_MAX:
                raise BadHead(431, f"the request's head has more than {HEAD_MAX} bytes")
            if end < 0:
                return self._part_of_head(data, fresh)
            self._ahead, self._check = b"", None
            end += len(END)
            raw = data[:end]
            head = read_head(raw)
            if head.method == "POST" and head.ordinary:
                handler = self._listener.handlers.get(head.path)
                if handler is not None:
                    return self._begin(head, handler, raw, data[end:])
        except BadHead as bad:
            return self._refuse(bad)
        self._hand_over(data)

    def _part_of_head(self, data: bytes, fresh: bytes) -> None:
        self._ahead = data
        if not data:
            return
        if self._check is None:
            self._check = HeadCheck()
            self._state = ConnectionState.HEAD
            self.deadline = self._listener.loop.time() + HEAD_TIMEOUT
        self._check.feed(fresh)  # bytes that are not HTTP are refused at once, not after the timeout

    def _begin(self, head: RequestHead, handler: Handler, raw: bytes, rest: bytes) -> None:
        """A routed request's head is here."""
        listener = self._listener
        limit = listener.body_max
        self.keep_alive = head.keep_alive and not listener.draining and not listener.service.retiring
        self._refusal = None
        self._expects = "expect" in head.headers
        length = head.length
        if head.chunked:
            self._chunked = ChunkedBody(raw, limit)
        elif length > limit:
            self._refusal = too_large(limit)
        if not head.chunked and len(rest) >= length:
            self._body = rest[:length]
            self._ahead = rest[length:]
            self.body_read = True
            self._state = ConnectionState.ANSWER
            self.deadline = math.inf
        else:
            self.body_read = False
            self._state = ConnectionState.BODY
            self.deadline = listener.loop.time() + request_context.BODY_TIMEOUT
            self._left = length
            self._parts = []
            if rest:
                self._read_body(rest)
        caller = self._caller = Http1Exchange(self, head, listener.service.request_id(head.headers), self._remote())
        self._task = listener.loop.create_task(self._serve(caller, handler))

    def _read_body(self, data: bytes) -> None:
        if self._chunked is not None:
            return self._read_chunks(self._chunked, data)
        left = self._left - len(data)
        if self._refusal is None and self._parts is not None:
            self._parts.append(data if left >= 0 else data[: self._left])
        if left > 0:
            self._left = left
            return
        if left < 0:
            self._ahead = data[self._left :]
        parts = self._parts or []
        self._whole(parts[0] if len(parts) == 1 else b"".join(parts))

    def _read_chunks(self, chunked: ChunkedBody, data: bytes) -> None:
        try:
            rest = chunked.feed(data)
        except BadHead as bad:
            self._spoil(rejected(str(bad), code="invalid_body"))
            return
        if chunked.too_large:
            self._spoil(too_large(self._listener.body_max))
        elif chunked.done:
            self._ahead = rest
            if not chunked.sure:
                self.keep_alive = False
            self._whole(chunked.take())

    def _whole(self, body: bytes) -> None:
        self._body = body
        self._parts = self._chunked = None
        self.body_read = True
        self._state = ConnectionState.ANSWER
        self.deadline = math.inf
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _spoil(self, error: Exception) -> None:
        """The body can't be read to its end; the answer has the reason, and is the connection's last."""
        self._refusal = error
        self._parts = self._chunked = None
        self._state = ConnectionState.DISCARD
        self.deadline = math.inf
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    # --- answering --------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """Return the request's body.

        Raises:
            ClientError: 413, 408 or 400.
        """
        if self._refusal is None and not self.body_read:
            if self._expects and self._parts == [] and not self.closed:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = self._listener.loop.create_future()
            await self._waiter
        if self._refusal is not None:
            raise self._refusal
        body, self._body = self._body, b""
        return body

    async def drained(self) -> None:
        """Wait until the client has read enough.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self.closed:
            raise ConnectionResetError("the client is gone")
        if self.full:
            waiter: asyncio.Future[None] = self._listener.loop.create_future()
            if self._drainers is None:
                self._drainers = []
            self._drainers.append(waiter)
            await waiter

    async def _serve(self, caller: Http1Exchange, handler: Handler) -> None:
        try:
            await serve(self._listener.service, caller, handler)
        except ConnectionResetError:
            pass  # the client is gone, and that is in the log
        finally:
            self._task = None
            self._answered(caller)

    def _answered(self, caller: Http1Exchange) -> None:
        self._body = b""
        self._caller = None
        if self.closed:
            return
        if not caller.over:  # half an answer must not look like a whole one
            self.transport.abort()
        elif not self.body_read:
            self._linger()
        elif not self.keep_alive:
            self._close()
        elif self.full:
            self._state = ConnectionState.FLUSH
            self.deadline = self._listener.loop.time() + self._listener.stall_timeout
        else:
            self._next()

    def _next(self) -> None:
        """Be ready for the next request, which may be here already."""
        self._state = ConnectionState.IDLE
        listener = self._listener
        self.deadline = listener.loop.time() + listener.keep_alive
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if self._ahead:
            data, self._ahead = self._ahead, b""
            self._read_head(data)
        elif listener.draining:
            self._close()

    # --- ending -----------------------------------------------------------------------------------------------------

    def overdue(self) -> None:
        """The deadline has passed."""
        state = self._state
        if state is ConnectionState.HEAD:
            self._refuse(BadHead(408, f"the request's head did not arrive within {HEAD_TIMEOUT:g} s"))
        elif state is ConnectionState.BODY:
            timeout = request_context.BODY_TIMEOUT
            self._spoil(rejected(f"the body did not arrive within {timeout:g} s", code="body_timeout", status=408))
        elif state is ConnectionState.IDLE or state is ConnectionState.DISCARD:
            self._close()
        else:
            self.transport.abort()

    def abort(self) -> None:
        """Cut the connection."""
        if not self.closed:
            self.transport.abort()

    def close_idle(self) -> None:
        """Close an idle connection at once, else after the present answer."""
        self.keep_alive = False
        if self.idle:
            self._close()

    async def ended(self) -> None:
        """Wait for the task that answers, if there is one."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _close(self) -> None:
        self._state = ConnectionState.CLOSING
        self.deadline = self._listener.loop.time() + self._listener.stall_timeout
        self.transport.close()

    def _linger(self) -> None:
        self._state = ConnectionState.DISCARD
        self._ahead = b""
        self._parts = self._chunked = None
        self.deadline = self._listener.loop.time() + self._listener.linger
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _refuse(self, bad: BadHead) -> None:
        """Answer bytes that are no valid request, and end the connection."""
        log.info("refused a malformed request: %s", bad)
        self._check = None
        code = {408: "head_timeout", 431: "head_too_large"}.get(bad.status, "invalid_http")
        error = problem(bad.status, str(bad), code=code)
        more = f"content-length: {len(error.body)}\r\nconnection: close\r\n"
        self.transport.write(answer_head(error.status, error.headers, None, more) + error.body)
        self._linger()

    def _hand_over(self, data: bytes) -> None:
        """Give the connection to the plain server from here on."""
        transport = self.transport
        self.closed = True  # this server does not touch it any more
        self._listener.connections.discard(self)
        handler = self._listener.plain()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        if self.full:
            handler.pause_writing()
        handler.data_received(data)

    # --- internals --------------------------------------------------------------------------------------------------

    def _wake_drainers(self, error: Exception | None) -> None:
        waiters, self._drainers = self._drainers, None
        for waiter in waiters or ():
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _remote(self) -> str | None:
        peer = self.transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) else None
