"""Spoken message: collects what a client gets of a chat's answer, and returns it as the conversation's next message."""

import msgspec

from penstock.adapters.engines.http.event_stream import chunks_of
from penstock.frontend.exchange.transcript import TEXT_BYTES_MAX
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
        content: str | None
        if streamed:
            deltas = [choice.get("delta") or {} for chunk in chunks_of(body) for choice in chunk.get("choices") or ()]
            content = "".join(delta.get("content") or "" for delta in deltas)
            calls = _joined([call for delta in deltas for call in delta.get("tool_calls") or ()])
        else:
            message = _unary_message(body)
            content, calls = message.get("content"), message.get("tool_calls") or []
        if not content and not calls:
            return None
        return {"role": "assistant", "content": content or None, **({"tool_calls": calls} if calls else {})}


def _unary_message(body: bytes) -> JsonObject:
    try:
        choices = msgspec.json.decode(body).get("choices") or [{}]
        message = choices[0].get("message")
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError):
        return {}  # it went to the client as it is, and is no chat
    return message if isinstance(message, dict) else {}


def _joined(parts: list[JsonObject]) -> list[JsonObject]:
    """Return whole tool calls of the parts that streams send."""
    calls: dict[int, JsonObject] = {}
    for part in parts:
        function = part.get("function") or {}
        call = calls.setdefault(
            part.get("index", 0), {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
    return list(calls.values())
