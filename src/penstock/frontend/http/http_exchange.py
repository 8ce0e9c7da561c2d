"""`HttpExchange`: the seam between a client's request with its answer and the HTTP server that carries it.

The thin HTTP binding: a completion's life (`penstock.frontend.exchange.exchange`) knows only this.
`penstock.frontend.http.http1_exchange` implements it, of the server written by hand for speed; one over aiohttp is its
oracle in the tests; `CollectedExchange` stands in for a client where the request is ours. Whatever carries an answer
passes it through its filters first.
"""

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.kernel.values import JsonObject

COPY_MAX = 4 << 20
"""Bytes of an answer that are remembered for comparison; a longer one is not compared."""
MODEL_HEADER = "x-penstock-model"
_MODEL = re.compile(rb'"model":\s*"(?:[^"\\]|\\.)*"')
"""The field itself: inside a text its quotes would be escaped."""
_MODEL_BEGUN = re.compile(rb'"(?:m|mo|mod|mode|model|model"|model":\s*|model":\s*"(?:[^"\\]|\\.){0,1024}[\\"]?)?\Z')
_NAMES_MODELS = ("application/json", "text/event-stream")
"""Content types of answers that have such a field; a text may look as if it had."""
LOWEST: Mapping[str, str] = MappingProxyType(
    {
        "content-type": "application/json",
        "x-penstock-strict-priority": "0",
        "x-penstock-priority": str(-(2**31)),
    }
)
"""Headers of every request of a batch: in the queue, and in engines that schedule by priority, it goes last."""


class WholeAnswer(NamedTuple):
    """An answer that is not streamed."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class AnswerFilter:
    """Changes, or remembers, an answer on its way out; by itself it does neither."""

    async def whole(self, answer: WholeAnswer) -> WholeAnswer:
        """Return what is sent in place of a whole answer."""
        return answer

    def head(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers of a streamed answer."""
        return headers

    def piece(self, data: bytes) -> bytes:
        """Return what is written in place of bytes of a stream."""
        return data


async def filtered(filters: Iterable[AnswerFilter], answer: WholeAnswer) -> WholeAnswer:
    """Return a whole answer as it leaves the filters."""
    for each in filters:
        answer = await each.whole(answer)
    return answer


class HttpExchange(Protocol):
    """A client's request. ``headers`` is case-insensitive; ``fields`` go into its line of the access log.

    An answer is either one `send`, or `open`, any number of `write`, and `end`. Where the client is gone, the task
    that serves it is cancelled; a waiting call may raise ConnectionResetError before that.
    """

    filters: list[AnswerFilter]
    """What the answer passes, in this order: the nearest to the engine first."""

    id: str
    """The request's id; it goes out as x-request-id."""
    method: str
    path: str
    headers: Mapping[str, str]
    remote: str | None
    name: str
    """Name of the API key, or the address: the caller for counts and logs."""
    fields: dict[str, Any]

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            ClientError: 413 too large, 408 too slow, 400 broken off.
        """
        ...

    @property
    def status(self) -> int | None:
        """The status that was sent or opened; None before."""
        ...

    @property
    def last_write(self) -> float:
        """`time.monotonic` when bytes were last sent to the client, or its request began; infinity without a client."""
        ...

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        """Answer as a whole; ``headers`` name at least content-type. ``close`` ends the connection afterwards."""
        ...

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a streamed answer; its head goes out together with the first `write`, in one packet."""
        ...

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes of the body as soon as possible; where `full`, wait for `drained`.

        Args:
            last: nothing comes after them, so that the end of the body goes out in the same packet. `end` follows.
        """
        ...

    @property
    def full(self) -> bool:
        """Whether the client reads more slowly than we write."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read all or enough of the written bytes.

        Raises:
            ConnectionResetError: the client is gone.
        """
        ...

    async def end(self) -> None:
        """End the streamed answer."""
        ...

    def abort(self) -> None:
        """Cut the connection at once."""
        ...


class NamedAnswer(AnswerFilter):
    """Has the answer to a request by another name than its model's own say the name that was asked for.

    Args:
        model: the model that answers; a header names it.
        name: what the answer's field ``model`` is to say; None leaves it.
        copies: remember the answer, as its engine gave it.
    """

    def __init__(self, model: str, name: str | None, *, copies: bool = False) -> None:
        self.copy: bytearray | None = bytearray() if copies else None
        """None where nothing is to be remembered, or it was too long."""
        self._model = model
        self._field = None if name is None else b'"model":' + msgspec.json.encode(name)
        self._begun = b""
        """The beginning of what may be the field, at the end of a piece: routes of engines are cut anywhere."""

    async def whole(self, answer: WholeAnswer) -> WholeAnswer:
        headers = self.head(answer.headers)
        return WholeAnswer(answer.status, self._named(answer.body), headers)

    def head(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if not headers.get("content-type", "").startswith(_NAMES_MODELS):
            self._field = None
        return {**headers, MODEL_HEADER: self._model}

    def piece(self, data: bytes) -> bytes:
        if self._begun:
            data, self._begun = self._begun + data, b""
        if self._field is not None and not data.endswith(b"\n") and (begun := _MODEL_BEGUN.search(data)) is not None:
            data, self._begun = data[: begun.start()], begun[0]
        return self._named(data)

    def _named(self, data: bytes) -> bytes:
        if self.copy is not None:
            self.copy += data
            if len(self.copy) > COPY_MAX:
                self.copy = None
        field = self._field
        return data if field is None or b'"model"' not in data else _MODEL.sub(lambda _: field, data)


class ClientlessExchange:
    """A request that we make ourselves (`HttpExchange`), whose answer goes to no connection; by itself it is lost.

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
        self.filters: list[AnswerFilter] = []
        self.status: int | None = None

    @property
    def full(self) -> bool:
        return False

    async def body(self) -> bytes:
        return self.sent

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        answer = await filtered(self.filters, WholeAnswer(status, body, headers))
        self.status = answer.status
        self.take_whole(answer)

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def write(self, data: bytes, *, last: bool = False) -> None:
        for each in self.filters:
            data = each.piece(data)
        self.take_piece(data)

    def take_whole(self, answer: WholeAnswer) -> None:
        """Nobody reads it."""

    def take_piece(self, data: bytes) -> None:
        """Nobody reads it."""

    async def drained(self) -> None:
        """Return at once: nobody reads too slowly."""

    async def end(self) -> None:
        """Nobody waits for the end."""

    def abort(self) -> None:
        """There is no connection."""


class CollectedExchange(ClientlessExchange):
    """A request that we make ourselves, with its answer collected in memory."""

    def __init__(self, id: str, path: str, name: str, sent: bytes, headers: Mapping[str, str] = LOWEST) -> None:
        super().__init__(id, path, name, dict(headers), sent)
        self.answer = b""

    def take_whole(self, answer: WholeAnswer) -> None:
        self.answer = answer.body

    def take_piece(self, data: bytes) -> None:
        self.answer += data

    def abort(self) -> None:
        """Drop half an answer: it must not look like a whole one."""
        self.status, self.answer = None, b""
