"""The oracle of the hand-written server: `HttpExchange` over aiohttp, and a server that carries everything by it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.frontend.app import public_app, routed_handlers
from penstock.frontend.http import middleware
from penstock.frontend.http.error_responses import response_of
from penstock.frontend.http.http_exchange import AnswerFilter, WholeAnswer, filtered
from penstock.frontend.http.middleware import Handler
from penstock.frontend.http.request_context import CALLER, FIELDS, REQUEST_ID, read_body
from penstock.frontend.http.request_gate import serve
from penstock.frontend.service import Service


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
        self.filters: list[AnswerFilter] = []
        request[FIELDS] = self.fields
        self.response: web.StreamResponse | None = None
        self._request = request
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
    def status(self) -> int | None:
        return None if self.response is None else self.response.status

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        status, body, headers = await filtered(self.filters, WholeAnswer(status, body, headers))
        self.response = web.Response(status=status, body=body, headers=headers)
        if close:
            self.response.force_close()

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        for each in self.filters:
            headers = each.head(headers)
        self.response = web.StreamResponse(status=status, headers=headers)
        # An HTTP/1.0 client does not know chunks: the connection's end is the body's.
        if self._request.version < (1, 1):
            self.response.force_close()

    def write(self, data: bytes, *, last: bool = False) -> None:
        for each in self.filters:
            data = each.piece(data)
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

    async def end(self) -> None:
        assert self.response is not None
        if not self.response.prepared and not self._waiting:
            await self.response.prepare(self._request)
        await self.drained()
        await self.response.write_eof()

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


@asynccontextmanager
async def aiohttp_server(service: Service) -> AsyncIterator[str]:
    """Serve every route of a service by aiohttp alone, connections kept; yields the URL."""
    gate, handlers = service.gate, routed_handlers(service)

    @web.middleware
    async def routed(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = gate.route(request.rel_url.path_safe) if request.method == "POST" else None
        if route is None:
            return await handler(request)
        doubt = middleware._doubtful(request)
        if doubt is not None:
            refused = response_of(doubt)
            refused.force_close()
            return refused
        request[REQUEST_ID] = gate.request_id(request.headers)
        caller = AiohttpExchange(request)
        await serve(gate, caller, handlers[route])
        assert caller.response is not None
        return caller.response

    app = public_app(service, with_admin=True)
    app.middlewares.insert(0, routed)
    app.on_response_prepare.remove(middleware.give_back)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, keepalive_timeout=75, shutdown_timeout=0.5, lingering_time=1.0
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
