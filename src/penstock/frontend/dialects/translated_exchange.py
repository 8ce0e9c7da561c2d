"""Translated exchange: a client's request of another API, which the chat's exchange answers as if it were a chat."""

from collections.abc import Mapping

from penstock.frontend.dialects.dialect_answer import DialectAnswer, Event, encoded
from penstock.frontend.http.error_responses import ErrorResponse
from penstock.frontend.http.exchange_cover import ExchangeCover
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.request_gate import Shape
from penstock.kernel.errors import EngineError


class TranslatedExchange(ExchangeCover):
    """One request, whose answer is translated on its way out.

    Args:
        shape: turns an error answer into the API's.
    """

    def __init__(self, caller: HttpExchange, answer: DialectAnswer, shape: Shape | None = None) -> None:
        super().__init__(caller)
        self._answer = answer
        self._shape = shape

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        if status < 400:
            body = self._answer.whole(body)
            headers = {**headers, "content-type": "application/json"}
        elif self._shape is not None:
            status, body, headers = self._shape(ErrorResponse(status, body, dict(headers)), self.id)
        await self._caller.send(status, body, headers, close=close)

    def write(self, data: bytes, *, last: bool = False) -> None:
        made: list[Event] = []
        try:
            for event in self._answer.events(data):
                made.append(event)
        except EngineError:  # what was read before goes out: without its first event a stream's error is not understood
            self._caller.write(encoded(made))
            raise
        self._caller.write(encoded(made), last=last)
