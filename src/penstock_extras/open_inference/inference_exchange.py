"""Inference exchange: one inference call in place of an HTTP request, with its answer as choices and pieces of text."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

import msgspec

from penstock.adapters.engines.http.event_stream import DONE, payload_of, split_events
from penstock.frontend.exchange.sse import output_tokens, prompt_tokens
from penstock.frontend.http.http_exchange import ClientlessExchange, WholeAnswer
from penstock.kernel.values import JsonObject

PIECES_MAX = 64
"""Pieces that wait for a slow client before the engine is read no further."""


class InferencePiece(NamedTuple):
    """Text of a stream; ``finish`` is "" until its end."""

    text: str
    finish: str


class InferenceFailure(NamedTuple):
    """Why there is no answer: the status that an HTTP client would get."""

    status: int
    message: str
    retry_after: str | None = None


class _TextChoice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _TextChunk(msgspec.Struct):
    choices: list[_TextChoice] = []
    usage: JsonObject | None = None
    error: JsonObject | None = None


_decoder = msgspec.json.Decoder(_TextChunk)


class InferenceExchange(ClientlessExchange):
    """One call.

    Args:
        make_body: returns the body of a completion; its error is the request's.
    """

    def __init__(
        self, id: str, path: str, headers: Mapping[str, str], remote: str | None, make_body: Callable[[], bytes]
    ) -> None:
        super().__init__(id, path, remote or "local", headers, remote=remote)
        self.failure: InferenceFailure | None = None
        self.choices: list[InferencePiece] = []
        """The answer of a call that is not streamed, by index."""
        self.counts: dict[str, int] = {}
        """Tokens of prompt and answer, where the engine reports them."""
        self._make_body = make_body
        self._pieces: asyncio.Queue[InferencePiece | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._tail = b""

    async def body(self) -> bytes:
        return self._make_body()

    def take_whole(self, answer: WholeAnswer) -> None:
        status, body, headers = answer
        try:
            chunk = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.failure = InferenceFailure(502, f"the engine's answer is not a completion: {error}")
            return
        if status >= 400:
            message = str((chunk.error or {}).get("message", "it gave no reason"))
            self.failure = InferenceFailure(status, message, headers.get("retry-after"))
            return
        self._count(chunk)
        choices = sorted(chunk.choices, key=lambda choice: choice.index)
        self.choices = [InferencePiece(choice.text, choice.finish_reason or "") for choice in choices]

    def take_piece(self, data: bytes) -> None:
        *events, self._tail = split_events(self._tail + data)
        for payload in map(payload_of, events):
            if payload not in (b"", DONE):
                self._take(payload)

    @property
    def full(self) -> bool:
        return self._pieces.qsize() > PIECES_MAX

    async def drained(self) -> None:
        while self.full:
            self._room.clear()
            await self._room.wait()

    def abort(self) -> None:
        self.failure = InferenceFailure(502, "the answer broke off")

    def over(self) -> None:
        """Nothing comes any more: `pieces` ends."""
        self._pieces.put_nowait(None)

    async def pieces(self) -> AsyncIterator[InferencePiece]:
        """Yield a stream's text as it comes."""
        while (piece := await self._pieces.get()) is not None:
            self._room.set()
            yield piece

    def _take(self, payload: bytes) -> None:
        try:
            chunk = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # an engine's own event, which no client of this protocol knows
        if chunk.error is not None:
            self.failure = InferenceFailure(502, str(chunk.error.get("message", "the stream broke off")))
        self._count(chunk)
        for choice in chunk.choices:
            if choice.text or choice.finish_reason:
                self._pieces.put_nowait(InferencePiece(choice.text, choice.finish_reason or ""))

    def _count(self, chunk: _TextChunk) -> None:
        if chunk.usage is not None:
            counts = {"prompt_tokens": prompt_tokens(chunk.usage), "completion_tokens": output_tokens(chunk.usage)}
            self.counts = {name: count for name, count in counts.items() if count is not None}
