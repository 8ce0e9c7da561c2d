"""Named exchange: a request by another name than its model's own, whose answer says the name that was asked for."""

import re
from collections.abc import Mapping

import msgspec

from penstock.frontend.http.exchange_cover import ExchangeCover
from penstock.frontend.http.http_exchange import HttpExchange

COPY_MAX = 4 << 20
"""Bytes of an answer that are remembered for comparison; a longer one is not compared."""
MODEL_HEADER = "x-penstock-model"
_MODEL = re.compile(rb'"model":\s*"(?:[^"\\]|\\.)*"')
"""The field itself: inside a text its quotes would be escaped."""


class NamedExchange(ExchangeCover):
    """One request, with the names of its model in the answer.

    Args:
        model: the model that answers; a header names it.
        name: what the answer's field ``model`` is to say; None leaves it.
        copies: remember the answer, as its engine gave it.
    """

    def __init__(self, caller: HttpExchange, model: str, name: str | None, *, copies: bool = False) -> None:
        super().__init__(caller)
        self.copy: bytearray | None = bytearray() if copies else None
        """None where nothing is to be remembered, or it was too long."""
        self._model = model
        self._field = None if name is None else b'"model":' + msgspec.json.encode(name)

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        await super().send(status, self._named(body), {**headers, MODEL_HEADER: self._model}, close=close)

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        super().open(status, {**headers, MODEL_HEADER: self._model})

    def write(self, data: bytes, *, last: bool = False) -> None:
        super().write(self._named(data), last=last)

    def _named(self, data: bytes) -> bytes:
        if self.copy is not None:
            self.copy += data
            if len(self.copy) > COPY_MAX:
                self.copy = None
        field = self._field
        return data if field is None or b'"model"' not in data else _MODEL.sub(lambda _: field, data)
