"""Hand-written server's `HttpExchange`: every write goes to the socket at once."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

from penstock.frontend.http.http1_messages import RequestHead, answer_head, has_body
from penstock.frontend.http.http_exchange import AnswerFilter, WholeAnswer, filtered


class CarryingConnection(Protocol):
    """The connection that carries an exchange: `penstock.frontend.http.http1_server.ClientConnection`."""

    transport: Any
    closed: bool
    full: bool
    keep_alive: bool
    body_read: bool

    def send(self, head: bytes, body: bytes) -> None: ...
    async def body(self) -> bytes: ...
    async def drained(self) -> None: ...


class Http1Exchange:
    """One request on a connection, and its answer (`penstock.frontend.http.http_exchange.HttpExchange`)."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_cors",
        "_head",
        "_opened",
        "_over",
        "_transport",
        "body",
        "drained",
        "fields",
        "filters",
        "full",
        "headers",
        "id",
        "last_write",
        "method",
        "name",
        "path",
        "remote",
        "status",
    )

    def __init__(
        self,
        connection: CarryingConnection,
        head: RequestHead,
        id: str,
        remote: str | None,
        cors: str = "",
    ) -> None:
        self.id = id
        self.method = head.method
        self.path = head.path
        self.headers: Mapping[str, str] = head.headers
        self.remote = remote
        self.name = ""
        self.fields: dict[str, Any] = {}
        self.filters: list[AnswerFilter] = []
        self.status: int | None = None
        self.last_write = time.monotonic()
        self._head = head
        self._connection = connection
        self._cors = cors
        """Header lines for pages of other origins."""
        self._transport: Any = connection.transport
        self.full = connection.full
        self.body = connection.body
        self.drained = connection.drained
        self._opened: bytes | None = None
        """The head of a streamed answer, until it goes out with the first piece."""
        self._chunked = False
        self._over = False

    @property
    def over(self) -> bool:
        """Whether the answer is whole."""
        return self._over

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        if self.filters:
            status, body, headers = await filtered(self.filters, WholeAnswer(status, body, headers))
        self.status = status
        connection = self._connection
        if not has_body(status):
            body, more = b"", self._ending(close)
        else:
            more = f"content-length: {len(body)}\r\n{self._ending(close)}"
        head = answer_head(status, headers, self.id, more)
        self._over = True
        if not connection.closed:
            connection.send(head, body)

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        for each in self.filters:
            headers = each.head(headers)
        # An HTTP/1.0 client does not know chunks: the connection's end is the body's.
        self._chunked = not self._head.http10
        more = "transfer-encoding: chunked\r\n" if self._chunked else ""
        self._opened = answer_head(status, headers, self.id, more + self._ending(not self._chunked))
        self.status = status

    def write(self, data: bytes, *, last: bool = False) -> None:
        for each in self.filters:
            data = each.piece(data)
        if self._over or self._connection.closed or not data:
            return
        if self._chunked:
            data = (b"%x\r\n%b\r\n0\r\n\r\n" if last else b"%x\r\n%b\r\n") % (len(data), data)
        self._over = last
        if self._opened is not None:
            data = self._opened + data
            self._opened = None
        self.last_write = time.monotonic()
        self._transport.write(data)

    async def end(self) -> None:
        if not self._over:
            self._over = True
            last = b"0\r\n\r\n" if self._chunked else b""
            if self._opened is not None:
                last = self._opened + last
                self._opened = None
            if last and not self._connection.closed:
                self._transport.write(last)
        if self._connection.full:
            await self.drained()

    def abort(self) -> None:
        self._transport.abort()

    def _ending(self, close: bool) -> str:
        """Decide whether the connection stays open after this answer; return the header lines of that and of CORS."""
        connection = self._connection
        if close or not connection.body_read:
            connection.keep_alive = False
        if not connection.keep_alive:
            return f"{self._cors}connection: close\r\n"
        return f"{self._cors}connection: keep-alive\r\n" if self._head.http10 else self._cors
