"""Dialect answer: turns a chat's answer into that of another API; each API says how its events and bodies look.

An answer is a list of items: a passage of thinking, a passage of text, or a tool call. At most one is open at a time.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from penstock.adapters.engines.dialects.engine_failure import EngineFailure
from penstock.frontend.dialects.chat_reader import AnswerPiece, ChatReader, PieceKind, TokenCounts
from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.kernel.errors import EngineError
from penstock.kernel.hashing import BYTES_PER_TOKEN
from penstock.kernel.values import JsonObject

Event = tuple[str, JsonObject]
"""An event of a stream: its name and its data."""

OURS = "penstock_counted"
"""Field of an answer's usage: some of it was counted here, as the engine has no counts."""


@dataclass(slots=True)
class OutputItem:
    """An item of an answer."""

    kind: PieceKind
    index: int
    place: int
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


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
        self._begun = False
        self._over = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the chat's stream and return those of ours."""
        return encoded(self.events(data))

    def whole(self, body: bytes) -> bytes:
        """Return the body for a whole chat completion.

        Raises:
            EngineError: it is none.
        """
        try:
            for piece in self.reader.whole(body):
                self._item(piece).pieces.append(piece.text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"the engine's answer is no chat completion: {error}") from None
        self._over = True
        self.settled()
        return msgspec.json.encode(self.body())

    def events(self, data: bytes) -> Iterator[Event]:
        """Take bytes of the chat's stream and yield the events of ours."""
        if not self._begun:
            self._begun = True
            yield from self.opening()
        quiet = self.reader.quiet
        for piece in self.reader.feed(data):
            before = self._open
            item = self._item(piece)
            if item is not before:
                if before is not None:
                    yield from self.closed(before)
                yield from self.opened(item)
            if piece.text:
                item.pieces.append(piece.text)
                yield from self.grown(item, piece.text)
        if self.reader.quiet > quiet:
            yield from self.quiet()
        if self._over or not (self.reader.done or self.reader.error):
            return
        self._over = True
        self.settled()
        if self.reader.error is not None:
            yield from self.failed(self.reader.error)
            return
        if self._open is not None:
            yield from self.closed(self._open)
        yield from self.ending()

    def _item(self, piece: AnswerPiece) -> OutputItem:
        """Return the item that a piece belongs to: the open one, or a new one."""
        item = self._open
        if item is None or item.kind != piece.kind or (piece.kind == "call" and item.place != piece.place):
            item = OutputItem(piece.kind, len(self.items), piece.place, _id_of(piece), piece.name)
            self.items.append(item)
            self._open = item
        return item

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


def _id_of(piece: AnswerPiece) -> str:
    """Return a call's id; some engines give it none, and its result needs one to be told apart."""
    return piece.id or new_id("call") if piece.kind == "call" else ""


def encoded(events: Iterable[Event]) -> bytes:
    """Return events as the bytes of a stream."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data)) for name, data in events)


def new_id(kind: str) -> str:
    """Return an id that nobody can guess, such as ``resp_5f2c...``."""
    return f"{kind}_{secrets.token_hex(16)}"
