"""Responses answer: a chat's answer as OpenAI's responses API has it, streamed or whole."""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.adapters.engines.dialects.engine_failure import EngineFailure
from penstock.frontend.dialects.body_fields import custom_arguments, custom_input, mended, set_fields
from penstock.frontend.dialects.dialect_answer import OURS, DialectAnswer, Event, OutputItem, encoded
from penstock.frontend.dialects.response_tools import ResponseTools
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.prompt.context_overflow import CODE
from penstock.kernel.values import JsonObject

_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}
LEFT_OUT = "penstock_left_out"
"""Key of an answer's metadata: what of the request has no effect here."""
_CODES = {400: "invalid_prompt", 413: "invalid_prompt", 422: "invalid_prompt", 429: "rate_limit_exceeded"}
_ENDS = ("completed", "incomplete", "failed")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesAnswer(DialectAnswer):
    """One answer.

    Args:
        id: of the response.
        fields: of the request, which a response repeats.
        tools: of the request, by which calls are named.
        left_out: what of the request has no effect here.
        settle: called with the answer when it is whole or broken.
    """

    def __init__(
        self,
        id: str,
        fields: JsonObject,
        tools: ResponseTools,
        left_out: Sequence[str],
        isl: int,
        timing: TokenTiming,
        settle: Callable[["ResponsesAnswer"], None],
    ) -> None:
        super().__init__(isl, timing)
        self.id = id
        self.failure: JsonObject | None = None
        """What it failed of."""
        self._created = int(time.time())
        self._fields = fields
        self._tools = tools
        self._left_out = left_out
        self._settle = settle
        self._events = 0

    def opening(self) -> Iterable[Event]:
        response = self.response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def opened(self, item: OutputItem) -> Iterable[Event]:
        yield self._event("response.output_item.added", output_index=item.index, item=self._item_of(item, False))
        if item.kind != "call":
            yield self._in(item, "response.content_part.added", part=_content_part(item, ""))

    def grown(self, item: OutputItem, text: str) -> Iterable[Event]:
        if item.kind == "call":
            if not self._is_custom(item):  # its input is within JSON, which is not read before it is whole
                yield self._about(item, "response.function_call_arguments.delta", delta=text)
        elif item.kind == "thinking":
            yield self._in(item, "response.reasoning_text.delta", delta=text)
        else:
            yield self._in(item, "response.output_text.delta", delta=text, logprobs=[])

    def closed(self, item: OutputItem) -> Iterable[Event]:
        if self._is_custom(item):
            text = custom_input(item.text)
            yield self._about(item, "response.custom_tool_call_input.delta", delta=text)
            yield self._about(item, "response.custom_tool_call_input.done", input=text)
        elif item.kind == "call":
            name = self._tools.named(item.name).name
            yield self._about(item, "response.function_call_arguments.done", name=name, arguments=mended(item.text))
        elif item.kind == "thinking":
            yield self._in(item, "response.reasoning_text.done", text=item.text)
        else:
            yield self._in(item, "response.output_text.done", text=item.text, logprobs=[])
        if item.kind != "call":
            yield self._in(item, "response.content_part.done", part=_content_part(item, item.text))
        yield self._event("response.output_item.done", output_index=item.index, item=self._item_of(item, True))

    def ending(self) -> Iterable[Event]:
        response = self.body()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: EngineFailure) -> Iterable[Event]:
        yield self._event("response.failed", response=self.body())

    def quiet(self) -> Iterable[Event]:
        # The API has no event for that. Codex gives up a stream without events for 300 s, whatever comments come.
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def fail(self, failure: EngineFailure, status: int) -> None:
        """The answer never began."""
        self.failure = _failure_fields(failure, status)
        self._settle(self)

    def settled(self) -> None:
        if self.reader.error is not None:
            self.failure = _failure_fields(self.reader.error, self.reader.error.status or 500)
        self._settle(self)

    def body(self) -> JsonObject:
        if self.failure is not None:
            return self.response("failed")
        return self.response("incomplete" if self.reader.finish in _INCOMPLETE else "completed")

    def output(self) -> list[JsonObject]:
        """Return its items."""
        return [self._item_of(item, True) for item in self.items]

    def response(self, status: str) -> JsonObject:
        """Return the response object."""
        fields, ended = self._fields, status in ("completed", "incomplete")
        reason = _INCOMPLETE.get(self.reader.finish or "") if status == "incomplete" else None
        text = {"format": {"type": "text"}, **set_fields(**(fields.get("text") or {}))}
        reasoning = fields.get("reasoning") or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": bool(fields.get("background")),
            "error": self.failure,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": fields.get("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": {**(fields.get("metadata") or {}), **self._note()},
            "model": fields["model"],
            "output": self.output() if ended else [],
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "previous_response_id": fields.get("previous_response_id"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": fields.get("store") is not False,
            "temperature": fields.get("temperature"),
            "text": text,
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "top_p": fields.get("top_p"),
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": fields.get("user"),
        }

    def _usage(self) -> JsonObject:
        counts = self.counts
        usage: JsonObject = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": counts.thinking},
            "total_tokens": (counts.prompt or 0) + (counts.output or 0),
        }
        return {**usage, OURS: True} if counts.ours else usage

    def _item_of(self, item: OutputItem, whole: bool) -> JsonObject:
        """Return an item as the API has it; one that is not ``whole`` is empty as yet."""
        text = item.text if whole else ""
        status = "completed" if whole else "in_progress"
        if whole and item is self.items[-1] and self.reader.finish in _INCOMPLETE:
            status = "incomplete"
        shared: JsonObject = {"id": self._item_id(item), "status": status}
        if item.kind == "call":
            tool = self._tools.named(item.name)
            named = {"call_id": item.id, "name": tool.name, **set_fields(namespace=tool.namespace)}
            if tool.kind == "custom":
                return {**shared, "type": "custom_tool_call", **named, "input": custom_input(text)}
            return {**shared, "type": "function_call", **named, "arguments": mended(text) if whole else ""}
        content = [_content_part(item, text)] if whole else []
        if item.kind == "thinking":
            return {**shared, "type": "reasoning", "summary": [], "content": content}
        return {**shared, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, item: OutputItem) -> str:
        prefix = "ctc" if self._is_custom(item) else _PREFIXES[item.kind]
        return f"{prefix}_{self.id.partition('_')[2]}{item.index}"

    def _is_custom(self, item: OutputItem) -> bool:
        return item.kind == "call" and self._tools.named(item.name).kind == "custom"

    def _note(self) -> JsonObject:
        return {LEFT_OUT: ", ".join(self._left_out)} if self._left_out else {}

    def _about(self, item: OutputItem, name: str, /, **fields: object) -> Event:
        """Return an event about an item."""
        return self._event(name, item_id=self._item_id(item), output_index=item.index, **fields)

    def _in(self, item: OutputItem, name: str, /, **fields: object) -> Event:
        """Return an event about the one part of an item."""
        return self._about(item, name, content_index=0, **fields)

    def _event(self, name: str, /, **fields: object) -> Event:
        self._events += 1
        return name, {"type": name, "sequence_number": self._events - 1, **fields}


def _failure_fields(failure: EngineFailure, status: int) -> JsonObject:
    code = failure.code if failure.code == CODE else _CODES.get(status, "server_error")
    return {"code": code, "message": failure.message}


def replayed(response: JsonObject, after: int) -> bytes:
    """Return the events of a stored response as its stream had them, those beyond a sequence number.

    They are made by the way of any answer, from a chat that would have given these items.
    """
    tools = ResponseTools(response, [])
    deltas: list[JsonObject] = []
    for at, item in enumerate(response["output"]):
        kind = item["type"]
        if kind in ("message", "reasoning"):
            text = "".join(part["text"] for part in item["content"])
            deltas.append({"content" if kind == "message" else "reasoning_content": text})
            continue
        arguments = item["arguments"] if kind == "function_call" else custom_arguments(item["input"])
        function = {"name": tools.flat(item["name"], item.get("namespace")), "arguments": arguments}
        deltas.append({"tool_calls": [{"index": at, "id": item["call_id"], "function": function}]})
    answer = ResponsesAnswer(response["id"], response, tools, (), 0, TokenTiming(), lambda answer: None)
    answer._created = response["created_at"]
    details = response["incomplete_details"] or {}
    finish = next((why for why, name in _INCOMPLETE.items() if name == details.get("reason")), "stop")
    choices: list[JsonObject] = [*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": finish}]
    chunks = [b"data: %b\n\n" % msgspec.json.encode({"choices": [{"index": 0, **choice}]}) for choice in choices]
    *events, (_, last) = answer.events(b"".join(chunks) + b"data: [DONE]\n\n")
    kind = f"response.{response['status']}" if response["status"] in _ENDS else "response.incomplete"
    events.append((kind, {**last, "type": kind, "response": response}))
    return encoded(event for event in events if event[1]["sequence_number"] > after)


def _content_part(item: OutputItem, text: str) -> JsonObject:
    if item.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
