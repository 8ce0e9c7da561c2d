"""Messages answer: a chat's answer as Anthropic's messages API has it, streamed or whole, and its errors."""

from collections.abc import Iterable

import msgspec

from penstock.adapters.engines.dialects.engine_failure import EngineFailure, failure_of
from penstock.frontend.dialects.body_fields import arguments_of
from penstock.frontend.dialects.dialect_answer import OURS, DialectAnswer, Event, OutputItem, TokenCounts, new_id
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.http.error_responses import ErrorResponse
from penstock.frontend.prompt import context_overflow
from penstock.kernel.values import JsonObject

_STATUSES = {502: 500, 503: 529}
"""Statuses that the API has others for: an engine's failure, and no worker that is free."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesAnswer(DialectAnswer):
    """One answer.

    A stream's beginning has the prompt's tokens as counted here; its end has the engine's count.
    """

    def __init__(self, model: str, isl: int, timing: TokenTiming) -> None:
        super().__init__(isl, timing)
        self._model = model
        self._id = new_id("msg")

    def opening(self) -> Iterable[Event]:
        message = {**self._message([], TokenCounts(prompt=self._isl, output=0)), "stop_reason": None}
        yield _message_event("message_start", message=message)
        yield from self.quiet()

    def opened(self, item: OutputItem) -> Iterable[Event]:
        block: JsonObject
        if item.kind == "call":
            block = {"type": "tool_use", "id": item.id, "name": item.name, "input": {}}
        else:
            block = _passage(item, "")
        yield _message_event("content_block_start", index=item.index, content_block=block)

    def grown(self, item: OutputItem, text: str) -> Iterable[Event]:
        kind, name = {
            "thinking": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[item.kind]
        yield _message_event("content_block_delta", index=item.index, delta={"type": kind, name: text})

    def closed(self, item: OutputItem) -> Iterable[Event]:
        yield _message_event("content_block_stop", index=item.index)

    def ending(self) -> Iterable[Event]:
        delta = {"stop_reason": self._reason(), "stop_sequence": self.reader.stop}
        yield _message_event("message_delta", delta=delta, usage=_usage(self.counts))
        yield _message_event("message_stop")

    def failed(self, failure: EngineFailure) -> Iterable[Event]:
        yield _message_event("error", error=_error(failure, failure.status or 500))

    def quiet(self) -> Iterable[Event]:
        yield _message_event("ping")

    def body(self) -> JsonObject:
        return self._message([_block(item) for item in self.items], self.counts)

    def _message(self, content: list[JsonObject], counts: TokenCounts) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._reason(),
            "stop_sequence": self.reader.stop,
            "usage": _usage(counts),
        }

    def _reason(self) -> str:
        if self.reader.stop is not None:
            return "stop_sequence"
        if self.calls_tools and self.reader.finish != "length":
            return "tool_use"  # an engine whose call was forced says that the answer just stopped
        return _REASONS.get(self.reader.finish or "", "end_turn")


def anthropic_error(error: ErrorResponse, request: str) -> ErrorResponse:
    """Return an error answer as this API has it: its shape, and its own statuses."""
    status = _STATUSES.get(error.status, error.status)
    body = {"type": "error", "error": _error(failure_of(error.body), status), "request_id": request}
    return ErrorResponse(
        status, msgspec.json.encode(body), {**error.headers, "content-type": "application/json", "request-id": request}
    )


def _error(failure: EngineFailure, status: int) -> JsonObject:
    message = failure.message
    if failure.code == context_overflow.CODE:
        message = f"prompt is too long: {message}"  # the words by which its clients know that they must compact
    status = _STATUSES.get(status, status)
    kind = _KINDS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": kind, "message": message}


def _message_event(kind: str, **fields: object) -> Event:
    return kind, {"type": kind, **fields}


def _block(item: OutputItem) -> JsonObject:
    if item.kind != "call":
        return _passage(item, item.text)
    return {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments_of(item.text)}


def _passage(item: OutputItem, text: str) -> JsonObject:
    if item.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _usage(counts: TokenCounts) -> JsonObject:
    """Return usage: in this API the prompt's tokens do not include the cached ones."""
    usage: JsonObject = {
        "input_tokens": max(0, (counts.prompt or 0) - counts.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.output,
    }
    return {**usage, OURS: True} if counts.ours else usage
