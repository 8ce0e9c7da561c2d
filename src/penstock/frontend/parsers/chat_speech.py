"""Chat speech: reads what a chat's message, or a stream's delta, says, in every form in which engines write it.

The fragments of a stream's tool calls are put together, however their engine numbers them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.frontend.parsers.tool_format import arguments_text, json_object
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject

_TEXTS = ("text", "output_text", "refusal")
_WORDS = ("thinking", "text", "refusal", "content")
"""Fields of a part that have its words."""


class CallFragment(NamedTuple):
    """A tool call, or a piece of one. ``place``: its index among the calls; None where the engine gives none."""

    place: int | None
    id: str
    name: str
    arguments: str


class ChatSpeech(NamedTuple):
    """What a message says: its reasoning, its text and its tool calls."""

    thinking: str = ""
    text: str = ""
    calls: tuple[CallFragment, ...] = ()


def choices_in(chunk: Mapping[str, Any]) -> list[JsonObject]:
    """Return the choices of a chunk, or of a whole answer.

    Raises:
        EngineError: one of them can't be read.
    """
    return [_of_type(choice, dict, "a choice") for choice in _of_type(chunk.get("choices") or [], list, "choices")]


def speech_in(given: object) -> ChatSpeech:
    """Return what a message or a delta says.

    Raises:
        EngineError: something of it can't be read, and would be lost.
    """
    message: Mapping[str, Any] = _of_type(given, dict, "a message")
    thinking, text = _thinking_and_text(message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    thinking = "".join(_thinking_and_text(reasoning)) + thinking
    if not text:
        text = "".join(_thinking_and_text(message.get("refusal")))
    calls = message.get("tool_calls") or message.get("function_call") or ()
    several = isinstance(calls, list) and len(calls) > 1
    return ChatSpeech(
        thinking,
        text,
        tuple(
            _fragment(call, place if several else None)
            for place, call in enumerate(
                [calls] if isinstance(calls, dict) else _of_type(calls, (list, tuple), "calls")
            )
        ),
    )


def _thinking_and_text(content: object) -> tuple[str, str]:
    """Return the thinking and the text of content: a text, or parts of both, as Mistral's reasoning models write."""
    if content is None or isinstance(content, str):
        return "", content or ""
    pieces = list(_content_pieces(content, thinks=False))
    return "".join(text for thinks, text in pieces if thinks), "".join(text for thinks, text in pieces if not thinks)


def _content_pieces(content: object, *, thinks: bool) -> Iterator[tuple[bool, str]]:
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, str):
            yield thinks, part
            continue
        fields = _of_type(part, dict, "content")
        kind = fields.get("type", "text")
        given = next((fields[name] for name in _WORDS if fields.get(name)), "")
        if kind in ("thinking", "reasoning"):
            yield from _content_pieces(given, thinks=True)
        elif kind in _TEXTS:
            yield thinks, _of_type(given, str, "content")
        else:
            raise EngineError(f"the engine's answer has content of type {kind!r}, which can't be read")


def _fragment(call: object, place: int | None) -> CallFragment:
    fields: Mapping[str, Any] = _of_type(call, dict, "tool calls")
    function = _of_type(fields.get("function") or fields, dict, "tool calls")
    arguments = function.get("arguments")
    index, id = fields.get("index"), fields.get("id")
    if isinstance(index, str) and index.isdecimal():
        index = int(index[:9])
    return CallFragment(
        place if index is None else _of_type(index, int, "tool calls"),
        "" if id is None else str(_of_type(id, (str, int), "tool calls")),
        _of_type(function.get("name") or "", str, "tool calls"),
        arguments_text(arguments) if isinstance(arguments, dict) else _of_type(arguments or "", str, "tool calls"),
    )


def _of_type(value: Any, kind: Any, where: str) -> Any:
    """Return a value that is of a known type.

    Raises:
        EngineError: it is of another.
    """
    if not isinstance(value, kind):
        raise EngineError(f"the engine's answer has {where} of type {type(value).__name__}, which can't be read")
    return value


@dataclass(slots=True)
class StreamedCall:
    """One call; its name and id may come after the first fragment."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def complete(self) -> bool:
        """Whether its arguments are a whole JSON object, so that nothing of it can follow."""
        return bool(self.pieces) and self.pieces[-1].rstrip().endswith("}") and json_object(self.arguments) is not None


class StreamedCalls:
    """The calls of one choice, in the order of their beginning.

    A call is known by its index and its id together: engines send every call at index 0, or without an index, and
    others leave the id out. A second id at a known index begins a call, unless it comes with no name and more of
    arguments that are not whole (some give each fragment an id); so does another name where there are no ids.
    """

    def __init__(self) -> None:
        self.calls: list[StreamedCall] = []
        self._newest: dict[int | None, StreamedCall] = {}

    def take(self, fragment: CallFragment) -> StreamedCall:
        """Return the call that a fragment belongs to, with the fragment in it."""
        place, id, name, arguments = fragment
        call = self._newest.get(place)
        if place is None and id:
            call = next((known for known in self.calls if known.id == id), call)
        if call is None or self._begins(call, fragment):
            call = StreamedCall()
            self.calls.append(call)
        self._newest[place] = self._newest[None] = call
        call.id, call.name = call.id or id, call.name or name
        if arguments:
            call.pieces.append(arguments)
        return call

    @staticmethod
    def _begins(call: StreamedCall, fragment: CallFragment) -> bool:
        """Return whether a fragment at a call's place begins another one."""
        if fragment.id and call.id and (fragment.name or call.complete or not fragment.arguments):
            return fragment.id != call.id
        if not fragment.name or not call.name:
            return False
        return fragment.name != call.name or bool(fragment.arguments and call.complete)
