"""Hand-written HTTP/1.1 server: reads requests from a connection and answers them one at a time, in order, for speed.

Routed requests (`handlers`) are served here. Any other is answered by aiohttp, over a transport that is lent to it. A
connection that waits for its next request holds no parser, no task and no timer.
"""

import asyncio
import enum
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.adapters.http1_connection import HEAD_MAX, Http1Connection, header_lines
from penstock.frontend.http import request_context
from penstock.frontend.http.error_responses import problem, rejected
from penstock.frontend.http.http1_exchange import Http1Exchange
from penstock.frontend.http.http1_messages import (
    END,
    BadHead,
    ChunkedBody,
    HeadCheck,
    RequestHead,
    answer_head,
    decompressed,
    read_head,
)
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.lent_transport import LentTransport
from penstock.frontend.http.request_context import KEEP_ALIVE, LINGER, too_large
from penstock.frontend.http.request_gate import Handler, RequestGate, serve

log = logging.getLogger("penstock.frontend")

HEAD_TIMEOUT = 20.0
"""Seconds that a head has to arrive, from its first byte on."""
AHEAD_MAX = 64 * 1024
"""Bytes of following requests that are held while one is being answered; above it no more are read."""
_AT_ONCE_MAX = 64 * 1024
"""Largest compressed body that is unpacked on the event loop; a larger one goes to a thread."""


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


class ListenerState:
    """What the connections of one listening address share.

    Args:
        handlers: route of the gate -> the handler of POST.
        other: makes the protocol object of the aiohttp server, which answers every other request.
        serve: has a handler answer a request, however that ends.
    """

    def __init__(
        self,
        gate: RequestGate,
        handlers: Mapping[str, Handler],
        other: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        serve: Callable[[RequestGate, HttpExchange, Handler], Awaitable[None]] = serve,
    ) -> None:
        self.gate = gate
        self.serve = serve
        self.handlers = handlers
        self.other = other
        self.loop = loop
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.body_max = gate.settings.limits.body_max
        self.keep_alive = KEEP_ALIVE
        self.linger = LINGER

    @property
    def stall_timeout(self) -> float:
        return self.gate.settings.upstream.stall_timeout


class ClientConnection(Http1Connection):
    """One client's connection."""

    __slots__ = (
        "_ahead",
        "_asks_for_state",
        "_body",
        "_caller",
        "_check",
        "_chunked",
        "_coding",
        "_drainers",
        "_expects",
        "_left",
        "_lent",
        "_listener",
        "_parts",
        "_refusal",
        "_remote",
        "_state",
        "_task",
        "body_read",
        "full",
        "keep_alive",
    )

    def __init__(self, listener: ListenerState) -> None:
        super().__init__(listener.loop)
        self._listener = listener
        self.full = False
        """Whether the client reads more slowly than we write."""
        self.keep_alive = True
        self.body_read = True
        self._state = ConnectionState.IDLE
        self._ahead = b""
        """Bytes that are not parsed yet: a part of a head, or pipelined requests."""
        self._body = b""
        self._caller: Http1Exchange | None = None
        self._parts: list[bytes] | None = None
        self._left = 0
        self._lent: LentTransport | None = None
        self._asks_for_state = False
        """Whether the last request was not for an engine: such clients may ask on while this process drains."""
        self._expects = False
        self._check: HeadCheck | None = None
        self._chunked: ChunkedBody | None = None
        self._coding: str | None = None
        self._refusal: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._drainers: list[asyncio.Future[None]] | None = None

    @property
    def idle(self) -> bool:
        """Whether no byte of a request has come since the last answer."""
        return self._state is ConnectionState.IDLE

    # --- callbacks of the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._remote: str | None = peer[0] if isinstance(peer, tuple) else None
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
            if len(self._ahead) > AHEAD_MAX:
                self.pause()

    def pause_writing(self) -> None:
        self.full = True
        if self._caller is not None:
            self._caller.full = True
        elif self._lent is not None:
            self._lent.handler.pause_writing()

    def resume_writing(self) -> None:
        self.full = False
        if self._caller is not None:
            self._caller.full = False
        elif self._lent is not None:
            self._lent.handler.resume_writing()
        self._wake_drainers(None)
        if self._state is ConnectionState.FLUSH:
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._listener.connections.discard(self)
        self._wake_drainers(ConnectionResetError("the client is gone"))
        if self._task is not None:
            self._task.cancel()
        elif self._lent is not None:
            self._lent.handler.connection_lost(error)

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
        except BadHead as bad:
            return self._refuse(bad)
        self._begin(head, raw, data[end:])

    def _part_of_head(self, data: bytes, fresh: bytes) -> None:
        self._ahead = data
        if not data:
            return
        if self._check is None:
            self._check = HeadCheck()
            self._state = ConnectionState.HEAD
            self.deadline = self._listener.loop.time() + HEAD_TIMEOUT
        self._check.feed(fresh)  # bytes that are not HTTP are refused at once, not after the timeout

    def _begin(self, head: RequestHead, raw: bytes, rest: bytes) -> None:
        """A request's head is here."""
        listener = self._listener
        route = listener.gate.route(head.path) if head.method == "POST" else None
        if route is None:
            return self._lend(head, raw, rest)
        limit = listener.body_max
        self._asks_for_state = False
        self.keep_alive = head.keep_alive and not listener.draining and not listener.gate.retiring
        self._refusal = None
        self._coding = head.headers.get("content-encoding")
        expected = head.headers.get("expect")
        self._expects = expected is not None
        length = head.length
        if head.chunked:
            self._chunked = ChunkedBody(raw, limit)
        elif length > limit:
            self._refusal = too_large(limit)
        if expected is not None and expected.lower() != "100-continue":
            self._refusal = rejected("only 100-continue is understood", code="expectation", status=417)
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
        cors = listener.gate.cors
        caller = self._caller = Http1Exchange(
            self,
            head,
            listener.gate.request_id(head.headers),
            self._remote,
            "" if cors is None else header_lines(cors.headers(head.path, head.headers)),
        )
        self._task = listener.loop.create_task(self._serve(caller, listener.handlers[route]))

    def _lend(self, head: RequestHead, raw: bytes, rest: bytes) -> None:
        """Have aiohttp answer a request; it gets that request's bytes and no others."""
        listener = self._listener
        self._asks_for_state = True
        self.keep_alive = head.keep_alive and head.method != "CONNECT"
        self._chunked = ChunkedBody(raw, 0) if head.chunked else None
        self._left = head.length
        self.body_read = False
        self._state = ConnectionState.BODY
        self.deadline = listener.loop.time() + request_context.BODY_TIMEOUT + listener.linger
        lent = self._lent = LentTransport(self, listener.other, self._returned)
        if self.full:
            lent.handler.pause_writing()
        lent.handler.data_received(raw)
        if rest or not (head.chunked or head.length):
            self._pass_on(lent, rest)

    def _pass_on(self, lent: LentTransport, data: bytes) -> None:
        """Give aiohttp what is of its request's body, and keep the rest for the next request."""
        chunked = self._chunked
        if chunked is None:
            mine, rest = data[: self._left], data[self._left :]
            self._left -= len(mine)
            done = not self._left
        else:
            try:
                rest = chunked.feed(data)
                mine, done = data[: len(data) - len(rest)], chunked.done
                self.keep_alive = self.keep_alive and chunked.sure
            except BadHead:
                mine, rest, done = data, b"", False
                self._state = ConnectionState.DISCARD  # aiohttp finds the same, and says it
        if done:
            self._chunked = None
            self._ahead = rest
            self.body_read = True
            self._state = ConnectionState.ANSWER
            self.deadline = math.inf
        if mine:
            lent.handler.data_received(mine)

    def _returned(self) -> None:
        """aiohttp has answered."""
        lent, self._lent = self._lent, None
        if lent is None or self.closed:
            return
        lent.handler.connection_lost(None)
        self.keep_alive = self.keep_alive and lent.keep_alive
        self._answered(whole=True)

    def _read_body(self, data: bytes) -> None:
        if self._lent is not None:
            return self._pass_on(self._lent, data)
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
        self._wake()

    def _spoil(self, error: Exception) -> None:
        """The body can't be read to its end; the answer has the reason, and is the connection's last."""
        self._refusal = error
        self._parts = self._chunked = None
        self._state = ConnectionState.DISCARD
        self.deadline = math.inf
        self._wake(error=error)

    # --- answering --------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """Return the request's body.

        Raises:
            ClientError: 413, 408 or 400.
        """
        if self._refusal is None and not self.body_read:
            if self._expects and self._parts == [] and not self.closed:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._refusal is not None:
            raise self._refusal
        body, self._body = self._body, b""
        return body if self._coding is None else await self._decompressed(body, self._coding.lower())

    async def _decompressed(self, body: bytes, coding: str) -> bytes:
        limit = self._listener.body_max
        try:
            if coding == "identity" or not body:
                return body
            if len(body) <= _AT_ONCE_MAX:
                body = decompressed(body, coding, limit)
            else:
                body = await asyncio.to_thread(decompressed, body, coding, limit)
        except BadHead as bad:
            raise rejected(str(bad), code="invalid_body") from None
        if len(body) > limit:
            raise too_large(limit)
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
            await self._listener.serve(self._listener.gate, caller, handler)
        except ConnectionResetError:
            pass  # the client is gone, and that is in the log
        finally:
            self._task = self._caller = None
            self._answered(caller.over)

    def _answered(self, whole: bool) -> None:
        self._body = b""
        if self.closed:
            return
        if not whole:  # half an answer must not look like a whole one
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
        self.resume()
        if self._ahead:
            data, self._ahead = self._ahead, b""
            self._read_head(data)
        elif listener.draining and not self._asks_for_state:
            self._close()

    # --- ending -----------------------------------------------------------------------------------------------------

    def overdue(self) -> None:
        """The deadline has passed."""
        state = self._state
        if state is ConnectionState.HEAD:
            self._refuse(BadHead(408, f"the request's head did not arrive within {HEAD_TIMEOUT:g} s"))
        elif state is ConnectionState.BODY and self._lent is None:
            timeout = request_context.BODY_TIMEOUT
            self._spoil(rejected(f"the body did not arrive within {timeout:g} s", code="body_timeout", status=408))
        elif state is ConnectionState.IDLE or state is ConnectionState.DISCARD:
            self._close()
        else:
            self.transport.abort()

    def close_idle(self) -> None:
        """Close an idle connection at once, else after the present answer; not one that only asks for our state."""
        if not self._asks_for_state:
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
        self.resume()

    def _refuse(self, bad: BadHead) -> None:
        """Answer bytes that are no valid request, and end the connection."""
        log.info("refused a malformed request: %s", bad)
        self._check = None
        code = {408: "head_timeout", 431: "head_too_large"}.get(bad.status, "invalid_http")
        error = problem(bad.status, str(bad), code=code)
        more = f"content-length: {len(error.body)}\r\nconnection: close\r\n"
        self.transport.write(answer_head(error.status, error.headers, None, more) + error.body)
        self._linger()

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
