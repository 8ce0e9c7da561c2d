"""Chat reader: reads a chat completion's answer, streamed or whole, as pieces of thinking, text and tool calls."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from penstock.adapters.engines.dialects.engine_failure import EngineFailure, failure_in
from penstock.adapters.engines.http.event_stream import DONE, object_in, payload_of, split_events
from penstock.frontend.exchange.sse import cached_tokens, output_tokens, prompt_tokens
from penstock.frontend.exchange.upstream_request import error_text
from penstock.frontend.parsers.chat_speech import choices_in, speech_in
from penstock.frontend.parsers.streamed_calls import StreamedCall, StreamedCalls
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject

PieceKind = Literal["thinking", "text", "call", "quiet"]
"""``quiet`` stands for a comment line, which keeps a silent stream open."""


class AnswerPiece(NamedTuple):
    """A piece of an answer; ``call``: the tool call that it belongs to."""

    kind: PieceKind
    text: str
    call: StreamedCall | None = None


class TokenCounts(NamedTuple):
    """Tokens of a request, as the engine reports them; None where it does not."""

    prompt: int | None = None
    cached: int = 0
    output: int | None = None
    thinking: int = 0
    ours: bool = False
    """Whether some were counted here."""


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
        self._tail = b""
        self._calls: StreamedCalls | None = StreamedCalls()

    def feed(self, data: bytes) -> Iterator[AnswerPiece]:
        """Take bytes of a stream."""
        *events, self._tail = split_events(self._tail + data)
        for event in events:
            payload = payload_of(event)
            if not payload:
                yield AnswerPiece("quiet", "")
            elif payload == DONE:
                self.done = True
            else:
                yield from self._pieces(payload)

    def whole(self, body: bytes) -> Iterator[AnswerPiece]:
        """Read a whole answer.

        Raises:
            EngineError: it is no chat completion.
        """
        yield from self._pieces(body)
        self.done = True

    def _pieces(self, payload: bytes) -> Iterator[AnswerPiece]:
        chunk = object_in(payload)
        if chunk is None:
            raise EngineError(f"the engine's answer is not a chat completion: {error_text(payload)}")
        if chunk.get("error"):
            self.error = failure_in(chunk)
            return
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.counts = _counts(usage)
        for choice in choices_in(chunk):
            if choice.get("index") not in (None, 0, "0"):
                continue
            yield from self._speech(choice.get("delta") or {"content": choice.get("text")})
            message = choice.get("message")
            if message is not None:
                self._calls = None  # whole calls need no putting together: each is one
                yield from self._speech(message)
            if isinstance(finish := choice.get("finish_reason"), str):
                self.finish = finish or self.finish
            stop = choice.get("stop_reason")
            if isinstance(stop, str):
                self.stop = stop

    def _speech(self, message: object) -> Iterator[AnswerPiece]:
        speech = speech_in(message)
        if speech.thinking:
            yield AnswerPiece("thinking", speech.thinking)
        if speech.text:
            yield AnswerPiece("text", speech.text)
        for fragment in speech.calls:
            calls = self._calls or StreamedCalls()
            yield AnswerPiece("call", fragment.arguments, calls.take(fragment))


def _counts(usage: JsonObject) -> TokenCounts:
    details = usage.get("completion_tokens_details")
    thinking = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return TokenCounts(
        prompt=prompt_tokens(usage),
        cached=cached_tokens(usage) or 0,
        output=output_tokens(usage),
        thinking=thinking if isinstance(thinking, int) else 0,
    )
