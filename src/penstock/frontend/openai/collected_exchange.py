"""Collected exchange: one request of a batch in place of a client's, with its answer collected in memory."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.frontend.http.clientless_exchange import ClientlessExchange

LOWEST = {
    "content-type": "application/json",
    "x-penstock-strict-priority": "0",
    "x-penstock-priority": str(-(2**31)),
}
"""Headers of every request of a batch: in the queue, and in engines that schedule by priority, it goes last."""


class CollectedExchange(ClientlessExchange):
    """One request without a client."""

    def __init__(
        self, id: str, path: str, name: str, sent: bytes, headers: Mapping[str, str] = MappingProxyType(LOWEST)
    ) -> None:
        super().__init__(id, path, name, dict(headers), sent)
        self.answer = b""

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        self.status, self.answer = status, body

    def write(self, data: bytes, *, last: bool = False) -> None:
        self.answer += data

    def abort(self) -> None:
        """Drop half an answer: it must not look like a whole one."""
        self.status, self.answer = None, b""
