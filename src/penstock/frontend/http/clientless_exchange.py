"""Clientless exchange: a request that we make ourselves, whose answer goes to no connection; by itself it is lost."""

import math
from collections.abc import Mapping

from penstock.kernel.values import JsonObject


class ClientlessExchange:
    """One request (`penstock.frontend.http.http_exchange.HttpExchange`).

    Args:
        sent: the request's body.
    """

    method = "POST"
    last_write = math.inf

    def __init__(
        self, id: str, path: str, name: str, headers: Mapping[str, str], sent: bytes = b"", remote: str | None = None
    ) -> None:
        self.id, self.path, self.name, self.headers, self.remote = id, path, name, headers, remote
        self.sent = sent
        self.fields: JsonObject = {}
        self.status: int | None = None

    @property
    def begun(self) -> bool:
        return self.status is not None

    @property
    def full(self) -> bool:
        return False

    async def body(self) -> bytes:
        return self.sent

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        self.status = status

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Nobody reads it."""

    async def drained(self) -> None:
        """Return at once: nobody reads too slowly."""

    async def end(self) -> None:
        """Nobody waits for the end."""

    def abort(self) -> None:
        """There is no connection."""
