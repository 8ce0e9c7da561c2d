"""Exchange cover: a request whose answer is changed, or remembered, on its way out; by itself it does neither."""

from collections.abc import Mapping

from penstock.frontend.http.http_exchange import HttpExchange


class ExchangeCover:
    """One request (`penstock.frontend.http.http_exchange.HttpExchange`) over another."""

    def __init__(self, caller: HttpExchange) -> None:
        self.method, self.path, self.remote, self.name = caller.method, caller.path, caller.remote, caller.name
        self.headers = caller.headers
        self.fields = caller.fields
        self._caller = caller

    @property
    def id(self) -> str:
        return self._caller.id

    @id.setter
    def id(self, value: str) -> None:
        self._caller.id = value

    @property
    def begun(self) -> bool:
        return self._caller.begun

    @property
    def status(self) -> int | None:
        return self._caller.status

    @property
    def last_write(self) -> float:
        return self._caller.last_write

    @property
    def full(self) -> bool:
        return self._caller.full

    async def body(self) -> bytes:
        return await self._caller.body()

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        await self._caller.send(status, body, headers, close=close)

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        self._caller.open(status, headers)

    def write(self, data: bytes, *, last: bool = False) -> None:
        self._caller.write(data, last=last)

    async def drained(self) -> None:
        await self._caller.drained()

    async def end(self) -> None:
        await self._caller.end()

    def abort(self) -> None:
        self._caller.abort()
