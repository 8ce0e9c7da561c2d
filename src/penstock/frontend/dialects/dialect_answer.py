"""Dialect answer: turns a chat's answer, streamed or whole, into that of another API, which says how that looks.

An answer is a list of items: a passage of thinking, a passage of text, or a tool call. At most one is open at a time.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from penstock.adapters.engines.dialects.engine_failure import EngineFailure, failure_in
from penstock.adapters.engines.http.event_stream import DONE, object_in, payload_of, split_events
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.exchange.sse import cached_tokens, output_tokens, prompt_tokens
from penstock.frontend.exchange.upstream_request import error_text
from penstock.frontend.parsers.chat_speech import StreamedCall, StreamedCalls, choices_in, speech_in
from penstock.kernel.errors import EngineError
from penstock.kernel.hashing import BYTES_PER_TOKEN
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
            self.counts = _token_counts(usage)
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


def _token_counts(usage: JsonObject) -> TokenCounts:
    details = usage.get("completion_tokens_details")
    thinking = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return TokenCounts(
        prompt=prompt_tokens(usage),
        cached=cached_tokens(usage) or 0,
        output=output_tokens(usage),
        thinking=thinking if isinstance(thinking, int) else 0,
    )


Event = tuple[str, JsonObject]
"""An event of a stream: its name and its data."""

OURS = "penstock_counted"
"""Field of an answer's usage: some of it was counted here, as the engine has no counts."""


@dataclass(slots=True)
class OutputItem:
    """An item of an answer; ``call``: of its kind ``call``."""

    kind: PieceKind
    index: int
    call: StreamedCall | None = None
    pieces: list[str] = field(default_factory=list)
    sent: int = 0
    """Pieces that the client has."""
    over: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def id(self) -> str:
        """A call's id."""
        return "" if self.call is None else self.call.id

    @property
    def name(self) -> str:
        """A call's name."""
        return "" if self.call is None else self.call.name

    @property
    def begins(self) -> bool:
        """Whether the events that begin it can say what it is: name and id may come after a call's first fragment."""
        return self.call is None or bool(self.name and (self.id or self.pieces))

    @property
    def ends(self) -> bool:
        """Whether nothing of it can follow once another item has begun."""
        return self.call is None or self.call.complete


class DialectAnswer(ABC):
    """One answer.

    Args:
        isl: the prompt's tokens as counted here.
        timing: of the request; has the output's tokens as counted here.
    """

    def __init__(self, isl: int, timing: TokenTiming) -> None:
        self._isl = isl
        self._timing = timing
        self.reader = ChatReader()
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._closed = 0
        """Items whose events are all out; those behind the open one wait."""
        self._begun = False
        self._over = False

    def whole(self, body: bytes) -> bytes:
        """Return the body for a whole chat completion.

        Raises:
            EngineError: it is none.
        """
        for piece in list(self.reader.whole(body)):
            self._add_to_item(piece)
        for item in self.items:
            self._identify(item)
        self._over = True
        self.settled()
        return msgspec.json.encode(self.body())

    def events(self, data: bytes) -> Iterator[Event]:
        """Take bytes of the chat's stream and yield the events of ours."""
        if not self._begun:
            self._begun = True
            yield from self.opening()
        for piece in self.reader.feed(data):
            if piece.kind == "quiet":
                yield from self.quiet()
                continue
            self._add_to_item(piece)
            yield from self._ready_events(final=False)
        if self._over or not (self.reader.done or self.reader.error):
            return
        self._over = True
        if self.reader.error is None:
            yield from self._ready_events(final=True)
        self.settled()
        if self.reader.error is not None:
            yield from self.failed(self.reader.error)
            return
        yield from self.ending()

    def _add_to_item(self, piece: AnswerPiece) -> None:
        """Put a piece into the item that it belongs to: its call's, the newest one, or a new one."""
        if piece.call is not None:
            item = next((item for item in reversed(self.items) if item.call is piece.call), None)
        else:
            item = self.items[-1] if self.items and self.items[-1].kind == piece.kind else None
        if item is None:
            item = OutputItem(piece.kind, len(self.items), piece.call)
            self.items.append(item)
        if piece.text and not item.over:
            item.pieces.append(piece.text)

    def _ready_events(self, *, final: bool) -> Iterator[Event]:
        """Yield the events of what can be said: one item after the other, as their APIs have only one open at a time.

        Args:
            final: nothing more will come.
        """
        while self._closed < len(self.items):
            item = self.items[self._closed]
            if self._open is None:
                if not (final or item.begins):
                    return
                self._identify(item)
                self._open = item
                yield from self.opened(item)
            for text in item.pieces[item.sent :]:
                yield from self.grown(item, text)
            item.sent = len(item.pieces)
            if not final and (item is self.items[-1] or not item.ends):
                return
            item.over = True
            yield from self.closed(item)
            self._open = None
            self._closed += 1

    @staticmethod
    def _identify(item: OutputItem) -> None:
        """Give a call an id where its engine gave none: its result needs one to be told apart."""
        if item.call is not None:
            item.call.id = item.call.id or new_id("call")

    @property
    def counts(self) -> TokenCounts:
        """The tokens of a whole answer: the engine's counts, and our own where it has none."""
        counts = self.reader.counts
        if counts.prompt is not None and counts.output is not None:
            return counts
        size = sum(len(item.text.encode()) for item in self.items)
        output = self._timing.counted or size // BYTES_PER_TOKEN
        return counts._replace(
            prompt=self._isl if counts.prompt is None else counts.prompt,
            output=output if counts.output is None else counts.output,
            ours=True,
        )

    @property
    def calls_tools(self) -> bool:
        return any(item.kind == "call" for item in self.items)

    def settled(self) -> None:  # noqa: B027 - most APIs have nothing to do then
        """The answer is whole or broken: called once, before its last bytes go out."""

    @abstractmethod
    def opening(self) -> Iterable[Event]:
        """Return the events that begin a stream."""

    @abstractmethod
    def opened(self, item: OutputItem) -> Iterable[Event]:
        """Return the events that begin an item."""

    @abstractmethod
    def grown(self, item: OutputItem, text: str) -> Iterable[Event]:
        """Return the events of more text of an item."""

    @abstractmethod
    def closed(self, item: OutputItem) -> Iterable[Event]:
        """Return the events that end an item."""

    @abstractmethod
    def ending(self) -> Iterable[Event]:
        """Return the events that end a whole stream."""

    @abstractmethod
    def failed(self, failure: EngineFailure) -> Iterable[Event]:
        """Return the events that end a broken stream."""

    @abstractmethod
    def quiet(self) -> Iterable[Event]:
        """Return the events that keep a silent stream open."""

    @abstractmethod
    def body(self) -> JsonObject:
        """Return the whole answer."""


def encoded(events: Iterable[Event]) -> bytes:
    """Return events as the bytes of a stream."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data)) for name, data in events)


def new_id(kind: str) -> str:
    """Return an id that nobody can guess, such as ``resp_5f2c...``."""
    return f"{kind}_{secrets.token_hex(16)}"
