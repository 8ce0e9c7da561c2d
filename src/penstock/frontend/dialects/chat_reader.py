"""Chat reader: reads a chat completion's answer, streamed or whole, as pieces of thinking, text and tool calls."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.adapters.engines.dialects.engine_failure import EngineFailure, failure_in
from penstock.adapters.engines.http.event_stream import DONE, payload_of, split_events
from penstock.frontend.exchange.sse import cached_tokens, output_tokens, prompt_tokens
from penstock.kernel.values import JsonObject

PieceKind = Literal["thinking", "text", "call"]


class AnswerPiece(NamedTuple):
    """A piece of an answer. ``place``: which of the tool calls; ``id`` and ``name`` come with a call's first piece."""

    kind: PieceKind
    text: str
    place: int = 0
    id: str = ""
    name: str = ""


class TokenCounts(NamedTuple):
    """Tokens of a request, as the engine reports them; None where it does not."""

    prompt: int | None = None
    cached: int = 0
    output: int | None = None
    thinking: int = 0
    ours: bool = False
    """Whether some were counted here."""


class _CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ChatCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _CalledFunction | None = None


class _ChatSpeech(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ChatCall] | None = None


class _ChatChoice(msgspec.Struct):
    index: int = 0
    delta: _ChatSpeech | None = None
    message: _ChatSpeech | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _ChatChunk(msgspec.Struct):
    choices: list[_ChatChoice] = []
    usage: JsonObject | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_ChatChunk)


class ChatReader:
    """One answer; ``feed`` a stream's bytes, or give ``whole`` the body."""

    def __init__(self) -> None:
        self.finish: str | None = None
        """The engine's finish reason."""
        self.stop: str | None = None
        """The client's text at which it stopped, where the engine reports that."""
        self.counts = TokenCounts()
        self.error: EngineFailure | None = None
        """Why the stream broke off."""
        self.done = False
        """Whether the end mark came."""
        self.quiet = 0
        """Comment lines, which keep a silent stream open."""
        self._tail = b""

    def feed(self, data: bytes) -> Iterator[AnswerPiece]:
        """Take bytes of a stream."""
        *events, self._tail = split_events(self._tail + data)
        for event in events:
            payload = payload_of(event)
            if not payload:
                self.quiet += 1
            elif payload == DONE:
                self.done = True
            else:
                yield from self._pieces(_decoded(payload))

    def whole(self, body: bytes) -> Iterator[AnswerPiece]:
        """Read a whole answer.

        Raises:
            msgspec.DecodeError: it is no chat completion.
        """
        yield from self._pieces(_decoder.decode(body))
        self.done = True

    def _pieces(self, chunk: _ChatChunk | None) -> Iterator[AnswerPiece]:
        if chunk is None:
            return
        if chunk.error is not None:
            self.error = failure_in({"error": chunk.error})
            return
        if chunk.usage is not None:
            self.counts = _counts(chunk.usage)
        for choice in chunk.choices:
            if choice.index:
                continue
            speech = choice.delta or choice.message
            if speech is not None:
                yield from _pieces_of(speech)
            self.finish = choice.finish_reason or self.finish
            if isinstance(choice.stop_reason, str):
                self.stop = choice.stop_reason


def _pieces_of(speech: _ChatSpeech) -> Iterator[AnswerPiece]:
    thinking = speech.reasoning_content or speech.reasoning
    if thinking:
        yield AnswerPiece("thinking", thinking)
    if speech.content:
        yield AnswerPiece("text", speech.content)
    for place, call in enumerate(speech.tool_calls or ()):
        function = call.function or _CalledFunction()
        yield AnswerPiece(
            "call",
            function.arguments or "",
            place if call.index is None else call.index,
            call.id or "",
            function.name or "",
        )


def _decoded(payload: bytes) -> _ChatChunk | None:
    """Return a stream's chunk; None for what is none, such as an engine's own event."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _counts(usage: JsonObject) -> TokenCounts:
    details = usage.get("completion_tokens_details")
    thinking = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return TokenCounts(
        prompt=prompt_tokens(usage),
        cached=cached_tokens(usage) or 0,
        output=output_tokens(usage),
        thinking=thinking if isinstance(thinking, int) else 0,
    )
