"""Streamed calls: puts the fragments of a stream's tool calls together, however their engine numbers them."""

from dataclasses import dataclass, field

from penstock.frontend.parsers.chat_speech import CallFragment
from penstock.frontend.parsers.tool_format import json_object


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
