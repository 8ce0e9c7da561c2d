"""SSE tap on an engine's stream: detects the first token, counts output, removes what the client did not request.

Bytes pass unchanged. Only the events before the first token and those that mention usage, an error or the end are
decoded; everything after the first token costs a search for four words per block of bytes.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec

from penstock.kernel.values import JsonObject

TAIL_MAX = 16 * 1024 * 1024
"""Most bytes of an event whose end has not come yet; a longer one is passed on unread."""
GAVE_UP = frozenset({"abort"})
"""Finish reasons of requests that engines dropped themselves."""
_DONE = b"[DONE]"


class SseTap:
    """Follow one stream.

    Args:
        strip_usage: leave out the chunk that holds only usage, because the client did not request it.
        openai: False for a stream of another dialect, which is only counted.
        gave_up: finish reasons that mean a dropped request, not an end.
    """

    __slots__ = (
        "_gave_up",
        "_openai",
        "_passes",
        "_separator",
        "_strip",
        "_tail",
        "_words",
        "done",
        "error",
        "started",
        "tokens",
        "unsaid",
        "usage",
    )

    def __init__(self, *, strip_usage: bool, openai: bool = True, gave_up: Collection[str] = GAVE_UP) -> None:
        self._gave_up = gave_up
        self._words = _words(frozenset(gave_up))
        self.started = False
        """Whether output has passed."""
        self.tokens = 0
        """Chunks with output: about the output tokens, until usage gives the exact number."""
        self.usage: JsonObject | None = None
        self.done = False
        self.error: JsonObject | None = None
        """The engine's error in place of further output; its event and later ones are not passed on."""
        self.unsaid = b""
        """The events that were not passed on for that reason."""
        self._strip = strip_usage
        self._openai = openai
        self._passes = type(self) is SseTap
        """Whether events that need no change pass unchanged."""
        self._separator = b""
        self._tail = b""

    @property
    def at_boundary(self) -> bool:
        """Whether only whole events came so far, so that one of ours may go between."""
        return not self._tail

    def feed(self, data: bytes) -> bytes:
        """Take received bytes and return what may pass on: whole events, in order."""
        if not self._openai:
            self.started = True
            self.tokens += data.count(b"\n\n") or 1
            return data
        if self._passes and self.started and not self._tail and self._separator and data.endswith(self._separator):
            # Nearly every piece of a stream: whole events that need no decoding.
            for marker in self._words:
                if marker in data:
                    break
            else:
                self.tokens += data.count(self._separator)
                return data
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not self._separator:
            self._separator = _separator(data)
            if not self._separator:
                return self._keep_tail(b"", data)
        separator = self._separator
        if not data.endswith(separator):
            end = data.rfind(separator)
            if end < 0:
                return self._keep_tail(b"", data)
            end += len(separator)
            return self._keep_tail(self._whole(data[:end]), data[end:])
        return self._whole(data)

    def rest(self) -> bytes:
        """Return what is left at the end of the stream without a separator behind it."""
        tail, self._tail = self._tail, b""
        return self._event(tail) if tail.strip() else tail

    def _keep_tail(self, out: bytes, tail: bytes) -> bytes:
        if len(tail) > TAIL_MAX:
            self.started = True
            return out + tail
        self._tail = tail
        return out

    def _whole(self, data: bytes) -> bytes:
        if self.started and not self._matters(data):
            self.tokens += data.count(self._separator)
            return data
        separator = self._separator
        out = b""
        for part in data.split(separator)[:-1]:
            out += self._event(part + separator)
        return out

    def _event(self, event: bytes) -> bytes:
        """Decode one event and return it, or b"" where it is not for the client."""
        if self.error is not None:
            self.unsaid += event
            return b""
        payload = event.strip()
        if not payload.startswith(b"data:"):
            return event  # a comment or another field of the protocol
        if _DONE in payload and self._is_end(payload):
            return event
        if self.started and not self._matters(payload):
            self.tokens += 1
            return event
        chunk = self._decoded(payload)
        if chunk is None:
            self.started = True
            self.tokens += 1
            return event
        if self._is_error(chunk, event):
            return b""
        choices = chunk.get("choices")
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
            if not choices:
                return b"" if self._strip else event
        if _has_output(choices):
            self.started = True
            self.tokens += 1
        return event

    def _matters(self, data: bytes) -> bool:
        """Return whether events after the first token have to be decoded."""
        for marker in self._words:  # noqa: SIM110 - a generator would cost as much as all the searches
            if marker in data:
                return True
        return False

    def _is_end(self, payload: bytes) -> bool:
        """Return whether an event's payload is the end mark, and record that it came."""
        if payload[5:].strip() != _DONE:
            return False
        self.done = True
        return True

    def _decoded(self, payload: bytes) -> JsonObject | None:
        """Return the chunk that an event holds, or None where it holds none."""
        try:
            chunk = msgspec.json.decode(payload[5:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return None
        return chunk if isinstance(chunk, dict) else None

    def _is_error(self, chunk: JsonObject, event: bytes) -> bool:
        """Return whether a chunk reports an engine's failure, and record its error."""
        choices = chunk.get("choices")
        if choices is None and "error" in chunk:
            error = chunk["error"]
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            self.unsaid += event
            return True
        for choice in choices or ():
            if isinstance(choice, dict) and choice.get("finish_reason") in self._gave_up:
                # Not requested here: the engine is being stopped, or an operator ended the request there.
                self.error = {"message": "the engine aborted the request"}
                return True
        return False


@lru_cache(maxsize=64)
def _words(gave_up: frozenset[str]) -> tuple[bytes, ...]:
    """Return the words that mark events to decode."""
    return (b'"usage"', _DONE, b'"error"', *(b'"%b"' % reason.encode() for reason in gave_up if reason != "error"))


def cached_tokens(usage: JsonObject | None) -> int | None:
    """Return how many prompt tokens came from the engine's cache, or None where it does not report that."""
    details = (usage or {}).get("prompt_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if isinstance(value, int) and value >= 0 else None


def output_tokens(usage: JsonObject | None) -> int | None:
    """Return how many tokens the engine generated, or None where it does not report that."""
    value = (usage or {}).get("completion_tokens")
    return value if isinstance(value, int) and value >= 0 else None


def prompt_tokens(usage: JsonObject | None) -> int | None:
    """Return how many tokens the engine counted in the prompt, or None where it does not report that."""
    value = (usage or {}).get("prompt_tokens")
    return value if isinstance(value, int) and value >= 0 else None


def _separator(data: bytes) -> bytes:
    """Return the separator of events: the first blank line decides; b"" while there is none."""
    plain, crlf = data.find(b"\n\n"), data.find(b"\r\n\r\n")
    if crlf >= 0 and (plain < 0 or crlf < plain):
        return b"\r\n\r\n"
    return b"\n\n" if plain >= 0 else b""


def _has_output(choices: Any) -> bool:
    """Return whether a chunk holds output of the model, in any field, or a finish reason."""
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if choice.get("finish_reason") or choice.get("text") or choice.get("token_ids"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for key, value in delta.items():
                if value and key != "role":
                    return True
    return False
