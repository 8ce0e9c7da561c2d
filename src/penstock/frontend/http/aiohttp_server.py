"""aiohttp server's `HttpExchange`, and the route that serves a routed request through it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from penstock.frontend.http.request_context import CALLER, FIELDS, REQUEST_ID, gate_of, read_body
from penstock.frontend.http.request_guard import Handler, serve


class AiohttpExchange:
    """An `HttpExchange` over one aiohttp request.

    aiohttp writes only in coroutines, so written bytes wait here until `drained`.
    """

    def __init__(self, request: web.Request) -> None:
        self.method = request.method
        self.path = request.path
        self.headers: Mapping[str, str] = request.headers
        self.remote = request.remote
        self.fields: dict[str, Any] = {}
        request[FIELDS] = self.fields
        self.response: web.StreamResponse | None = None
        self._request = request
        # The hand-written server takes its clients' next request only on another connection.
        self._last = gate_of(request).settings.http == "fast"
        self._waiting: list[bytes] = []
        self._writing = False

    @property
    def id(self) -> str:
        return str(self._request[REQUEST_ID])

    @id.setter
    def id(self, value: str) -> None:
        self._request[REQUEST_ID] = value

    @property
    def name(self) -> str:
        return str(self._request.get(CALLER))

    @name.setter
    def name(self, value: str) -> None:
        self._request[CALLER] = value

    async def body(self) -> bytes:
        return await read_body(self._request)

    @property
    def begun(self) -> bool:
        return self.response is not None

    @property
    def status(self) -> int | None:
        return None if self.response is None else self.response.status

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        self.response = web.Response(status=status, body=body, headers=headers)
        if close or self._last:
            self.response.force_close()

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        # An HTTP/1.0 client does not know chunks: the connection's end is the body's.
        if self._last or self._request.version < (1, 1):
            self.response.force_close()

    def write(self, data: bytes) -> None:
        self._waiting.append(data)

    @property
    def full(self) -> bool:
        return self._writing or bool(self._waiting)

    async def drained(self) -> None:
        if not self._waiting:
            return
        assert self.response is not None
        if not self.response.prepared:
            # The head waits for the first write: one packet, so no delayed acknowledgement holds it up.
            await self.response.prepare(self._request)
        data = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        self._waiting.clear()
        self._writing = True
        await self.response.write(data)
        self._writing = False

    async def end(self, *, close: bool = False) -> None:
        assert self.response is not None
        if close:
            self.response.force_close()
        if not self.response.prepared and not self._waiting:
            await self.response.prepare(self._request)
        await self.drained()
        await self.response.write_eof()

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def routed(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the aiohttp route that has a request served as `penstock.frontend.http.request_guard.serve` does."""

    async def route(request: web.Request) -> web.StreamResponse:
        gate = gate_of(request)
        request[REQUEST_ID] = gate.request_id(request.headers)
        caller = AiohttpExchange(request)
        await serve(gate, caller, handler)
        assert caller.response is not None
        return caller.response

    return route
