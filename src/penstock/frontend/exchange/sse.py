"""SSE tap on an engine's stream: detects the first token, counts output, removes what the client did not request.

Bytes pass unchanged. Only the events before the first token and those that mention a finish reason, usage, an error or
the end are decoded; everything after the first token costs a search for a few words per piece.
"""

import re
from collections.abc import Collection
from typing import Annotated, Any

import msgspec

from penstock.adapters.engines.dialects.dialect import GAVE_UP
from penstock.adapters.engines.dialects.engine_failure import EngineFailure, dropped_by_engine, failure_in, failure_of
from penstock.adapters.engines.http.event_stream import (
    BLANK_LINES,
    DONE,
    is_named_error,
    object_in,
    payload_of,
    split_events,
    stray_text,
)
from penstock.frontend.parsers.harmony_text import PASSED_ON, HarmonyWatch
from penstock.frontend.prompt.request_body import without_places
from penstock.kernel.values import JsonObject

TAIL_MAX = 16 * 1024 * 1024
"""Most bytes of an event whose end has not come yet; a longer one is passed on unread."""
_WORDS = (b'"finish_reason":"', b'"finish_reason": "', b'"usage":{', b'"usage": {', b'"error"', b"_params", DONE)
"""What marks events to decode. A usage of null, which SGLang sends in every chunk, does not."""
_LIKE_HARMONY = re.compile(rb'"content": ?"(?:\\[nrt]| )*(?:"|<|\\u003[cC])')
"""A first text that may become gpt-oss's own, which is looked at more closely."""
_CHUNK_ENDS = (b"}\n\n", b"}\r\n\r\n")


class SseTap:
    """Follow one stream.

    Args:
        strip_usage: leave out the chunk that holds only usage, because the client did not request it.
        openai: False for a stream of another dialect, which is only counted.
        gave_up: finish reasons that mean a dropped request, not an end.
        choices: how many the answer has.
    """

    __slots__ = (
        "_choices",
        "_finished",
        "_gave_up",
        "_harmony",
        "_openai",
        "_passes",
        "_strip",
        "_tail",
        "done",
        "error",
        "started",
        "tokens",
        "torn",
        "usage",
    )

    def __init__(
        self, *, strip_usage: bool, openai: bool = True, gave_up: Collection[str] = GAVE_UP, choices: int = 1
    ) -> None:
        self._gave_up = gave_up
        self._choices = choices
        self._finished: set[str] = set()
        self._harmony: HarmonyWatch | None = None
        self.started = False
        """Whether output has passed."""
        self.tokens = 0
        """Chunks with output: about the output tokens, until usage gives the exact number."""
        self.usage: JsonObject | None = None
        self.done = False
        """Whether the end mark came."""
        self.error: EngineFailure | None = None
        """The engine's error in place of further output; its event and later ones are not passed on."""
        self._strip = strip_usage
        self._openai = openai
        self._passes = type(self) is SseTap
        """Whether events that need no change pass unchanged."""
        self._tail = b""
        self.torn = False
        """Whether the beginning of an event was passed on unread, so that none of ours may follow yet."""

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: with the end of the body the stream is whole, mark or not."""
        return len(self._finished) >= self._choices

    def feed(self, data: bytes) -> bytes:
        """Take received bytes and return what may pass on: whole events, in order."""
        if not self._openai:
            self.started = True
            self.tokens += data.count(b"\n\n") or 1
            self.torn = not data.endswith(BLANK_LINES)
            return data
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if self._passes and self.started and not self.torn and data.endswith(_CHUNK_ENDS):
            # Nearly every piece of a stream: whole events that need no decoding.
            for marker in _WORDS:
                if marker in data:
                    break
            else:
                chunks = data.count(b'"choices":')  # in a text its quotes would be escaped
                if chunks == data.count(b"\ndata:") + data.startswith(b"data:"):
                    self.tokens += chunks
                    return data
        if data.endswith(BLANK_LINES):
            events = split_events(data)
        else:
            *events, tail = split_events(data)
            if len(tail) > TAIL_MAX:
                self.started = self.torn = True
                events.append(tail)
            else:
                self._tail = tail
        return b"".join(map(self._event, filter(None, events)))

    def _event(self, event: bytes) -> bytes:
        """Decode one event and return it, or b"" where it is not for the client."""
        if self.error is not None:
            return b""
        if self.torn:
            self.torn = not event.endswith(BLANK_LINES)
            return event
        payload = payload_of(event)
        if payload == DONE:
            self.done = True
            return event
        if not payload:
            stray = stray_text(event)
            if stray:
                self.error = failure_of(stray)
            return b"" if stray or event.isspace() else event  # a comment, or another field of the protocol
        if b"_params" in payload and (cleaned := without_places(payload)) is not payload:
            payload, event = cleaned, b"data: %b\n\n" % cleaned
        if b"\n" in payload:  # of several lines: what reads the stream behind this takes one
            payload = payload.replace(b"\n", b" ")
            event = b"data: %b\n\n" % payload
        chunk = object_in(payload)
        if chunk is None:
            self.error = failure_of(payload)
        else:
            self.error = self._failure(event, chunk)
        return b"" if chunk is None or self.error is not None else self._passed(event, chunk)

    def _passed(self, event: bytes, chunk: JsonObject) -> bytes:
        """Return what the client gets of an event with a chunk; b"" for nothing."""
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
            if not choices:
                return b"" if self._strip else event
        if _has_output(choices):
            self.tokens += 1
            if not self.started:
                if self._harmony is None and _LIKE_HARMONY.search(event):
                    self._harmony = HarmonyWatch()
                raw = False if self._harmony is None else self._harmony.verdict(choices or ())
                self.started = raw is False
                if raw:
                    self.error = PASSED_ON
                    return b""
        return event

    def _failure(self, event: bytes, chunk: JsonObject) -> EngineFailure | None:
        """Return the failure that a chunk reports, or None; note which choices it finishes."""
        failure = None
        choices = chunk.get("choices")
        if choices is None or b'"error"' in event or b"event:" in event:
            failure = failure_in(chunk, named=is_named_error(event))
        for choice in choices if isinstance(choices, list) else ():
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            if isinstance(reason, str) and reason in self._gave_up:
                # Not requested here: the engine failed or is being stopped, or an operator ended the request there.
                failure = failure or dropped_by_engine(reason)
            elif reason:
                self._finished.add(str(choice.get("index") or 0))
        return failure


def as_stream(body: bytes) -> bytes:
    """Return a whole answer as the stream that was asked for."""
    answer = object_in(body) or {}
    for choice in answer["choices"]:
        if (message := choice.pop("message", None)) is None:
            continue
        choice["delta"], calls = message, message.get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                call.setdefault("index", index)
    return b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer)


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


DAY_MS = 86_400_000


class _EndedChoice(msgspec.Struct):
    finish_reason: Any = None
    message: dict[str, msgspec.Raw] = {}
    error: Any = None


class AnswerEnd(msgspec.Struct):
    """What of an answer says how it ended."""

    choices: Annotated[list[_EndedChoice], msgspec.Meta(min_length=1)]
    counts: Any = msgspec.field(default=None, name="usage")
    error: Any = None
    metrics: Any = None

    @property
    def generation(self) -> float:
        """Seconds from the first token to the last, where the engine says so (vLLM's per-request metrics), else 0."""
        took = self.metrics.get("generation_time_ms") if isinstance(self.metrics, dict) else None
        return took / 1e3 if isinstance(took, int | float) and 0 < took < DAY_MS else 0.0

    @property
    def failed(self) -> bool:
        """Whether it reports an error in place of an answer."""
        return bool(self.error or any(choice.error for choice in self.choices))

    @property
    def usage(self) -> JsonObject | None:
        return self.counts if isinstance(self.counts, dict) else None

    @property
    def reasons(self) -> set[str]:
        """The finish reasons of its choices."""
        return {choice.finish_reason for choice in self.choices if isinstance(choice.finish_reason, str)}


class _UsageAnswer(msgspec.Struct):
    usage: JsonObject | None = None


_decoder = msgspec.json.Decoder(_UsageAnswer)
_ends = msgspec.json.Decoder(AnswerEnd)


def end_of(body: bytes) -> AnswerEnd | None:
    """Return the end of a completion's answer, or None where it is none."""
    try:
        return _ends.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        try:
            return _ends.decode(msgspec.json.encode(object_in(body)))  # which reads more
        except msgspec.DecodeError:
            return None


def usage_of(body: bytes) -> JsonObject | None:
    """Return the usage object of an answer, or None where it has none or is not JSON."""
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
