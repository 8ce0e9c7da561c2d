"""Spoken message: collects what a client gets of a chat's answer, and returns it as the conversation's next message."""

from penstock.adapters.engines.http.event_stream import chunks_of, object_in
from penstock.frontend.exchange.transcript import TEXT_BYTES_MAX
from penstock.frontend.parsers.chat_speech import choices_in, speech_in
from penstock.frontend.parsers.streamed_calls import StreamedCalls
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject


class SpokenMessage:
    """The answer to one chat, in the bytes that its client gets."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, data: bytes) -> None:
        """Take a piece of the answer."""
        self._size += len(data)
        if self._size <= TEXT_BYTES_MAX:
            self._pieces.append(data)

    def message(self, *, streamed: bool) -> JsonObject | None:
        """Return what callers send back with the next turn; None where it was too long to collect, or empty.

        Reasoning is left out, as callers and templates do.
        """
        if self._size > TEXT_BYTES_MAX:
            return None
        body = b"".join(self._pieces)
        content, calls = "", StreamedCalls()
        try:
            chunks = chunks_of(body) if streamed else [object_in(body) or {}]
            for choice in (each for chunk in chunks for each in choices_in(chunk)):
                speech = speech_in(choice.get("delta") or choice.get("message") or {})
                content += speech.text
                for fragment in speech.calls:
                    calls.take(fragment)
        except EngineError:
            return None  # it went to the client as it is, and is no chat that a next turn could be prepared with
        if not content and not calls.calls:
            return None
        made = [
            {"id": call.id or None, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls.calls
        ]
        return {"role": "assistant", "content": content or None, **({"tool_calls": made} if made else {})}
