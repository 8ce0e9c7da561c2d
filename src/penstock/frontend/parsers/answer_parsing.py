"""Answer parsing: reads tool calls and reasoning out of a chat's text, where its engine passes on what the model wrote.

It stands behind all that follows the engine's own text (the tap, the transcript), so that another engine can continue
an answer whose calls are parsed here.
"""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.adapters.engines.dialects.dialect import Dialect
from penstock.adapters.engines.http.event_stream import object_in, payload_of, split_events
from penstock.adapters.engines.pool_overrides import REASONING_PARSER, TOOL_PARSER
from penstock.frontend.parsers.parser_registry import ChoiceParser, reasoning_tags, thinks, tool_format, whole_text
from penstock.frontend.parsers.reasoning_stream import ReasoningTags
from penstock.frontend.parsers.tool_format import (
    ContentDelta,
    ParsedDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolFormat,
    ToolSchemas,
)
from penstock.frontend.prompt.request_body import Parsed
from penstock.kernel.values import JsonObject, WorkerCard

_OUTPUT_KEYS = ("content", "reasoning_content", "tool_calls", "role", "refusal", "function_call", "reasoning", "audio")
_CHOICE_KEYS = ("finish_reason", "token_ids", "logprobs")


class ParserPlan(NamedTuple):
    """What is parsed of one request's answer at one engine."""

    calls: ToolFormat | None
    tags: ReasoningTags | None

    @property
    def special(self) -> bool:
        """Whether the engine has to leave special tokens in its text."""
        return (self.calls is not None and self.calls.special) or (self.tags is not None and self.tags.special)


def parser_plan(card: WorkerCard, parsed: Parsed) -> ParserPlan | None:
    """Return what is parsed here of an engine's answer; None where it is passed on as it is."""
    if parsed.endpoint != "chat_completions":
        return None
    fields = parsed.fields
    wanted = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    calls = tool_format(card.labels.get(TOOL_PARSER)) if wanted else None
    tags = reasoning_tags(card.labels.get(REASONING_PARSER))
    return None if calls is None and tags is None else ParserPlan(calls, tags)


def raw_text_fields(plan: ParserPlan, dialect: Dialect, parsed: Parsed) -> JsonObject:
    """Return the fields that make an engine show the tools to the model and leave the model's text alone."""
    added: JsonObject = {}
    if plan.calls is not None and dialect.raw_tool_choice is not None:
        added["tool_choice"] = dialect.raw_tool_choice
    if plan.special and dialect.special_tokens_field is not None and dialect.special_tokens_field not in parsed.fields:
        added[dialect.special_tokens_field] = False
    return added


class AnswerParsing:
    """The parsing of one answer, over all engines that make it."""

    __slots__ = ("_head", "_options", "_parsers", "plan")

    def __init__(self, plan: ParserPlan, parsed: Parsed) -> None:
        self.plan = plan
        fields = parsed.fields
        self._options: tuple[ToolSchemas, bool, bool] = (
            _schemas(fields.get("tools")),
            thinks(fields.get("chat_template_kwargs")),
            fields.get("parallel_tool_calls") is False,
        )
        self._parsers: dict[int, ChoiceParser] = {}
        self._head: JsonObject = {}

    def stream(self, out: bytes) -> bytes:
        """Take whole events; return those for the client. What may become a call stays here until that is clear."""
        return b"".join([self._event(event) for event in split_events(out)])

    def whole(self, body: bytes) -> bytes:
        """Return an unary answer with its calls and its reasoning in their fields."""
        answer = object_in(body)
        choices = None if answer is None else answer.get("choices")
        if not isinstance(choices, list):
            return body
        for choice in choices:
            message = choice.get("message") if isinstance(choice, dict) else None
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                continue
            parser = self._parser(choice)
            message |= self._fields(parser, whole_text(parser, message["content"]), 0, whole=True)
            message["content"] = message["content"] or None if parser.calls else message["content"]
            choice["finish_reason"] = _finish_reason(parser, choice.get("finish_reason"))
        return msgspec.json.encode(answer)

    def rest(self) -> bytes:
        """Return as events what still stays here of an answer that broke off."""
        out = b""
        for index, parser in self._parsers.items():
            calls = parser.calls
            delta = self._fields(parser, parser.finish(), calls)
            if delta:
                choice = {"index": index, "delta": delta, "finish_reason": None}
                out += b"data: " + msgspec.json.encode({**self._head, "choices": [choice]}) + b"\n\n"
        return out

    def _event(self, event: bytes) -> bytes:
        chunk = object_in(payload_of(event)) or {}
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices:
            return event
        if not self._head:
            self._head = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
        chunk["choices"] = [choice for choice in choices if not isinstance(choice, dict) or self._says(choice)]
        if not chunk["choices"] and not chunk.get("usage"):
            return b""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _says(self, choice: JsonObject) -> bool:
        """Parse one choice of a chunk in place; return whether something of it is left for the client."""
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return True
        parser = self._parser(choice)
        calls = parser.calls
        text, reason = delta.get("content"), choice.get("finish_reason")
        deltas: list[ParsedDelta] = []
        if isinstance(text, str):
            del delta["content"]
            if not parser.ended:
                deltas += parser.feed(text)
            else:
                deltas.append(ContentDelta(text))
        if reason:
            deltas += parser.finish()
            choice["finish_reason"] = _finish_reason(parser, reason)
        delta |= self._fields(parser, deltas, calls)
        if text == "" and not deltas and "role" in delta:
            delta["content"] = ""  # as streams begin
        return any(delta.get(name) is not None for name in _OUTPUT_KEYS) or any(choice.get(n) for n in _CHOICE_KEYS)

    def _parser(self, choice: JsonObject) -> ChoiceParser:
        index = choice.get("index")
        place = index if isinstance(index, int) else 0
        parser = self._parsers.get(place)
        if parser is None:
            schemas, think, single = self._options
            parser = ChoiceParser(self.plan.calls, self.plan.tags, schemas, thinks=think, single=single)
            self._parsers[place] = parser
        return parser

    def _fields(
        self, parser: ChoiceParser, deltas: list[ParsedDelta], calls: int, *, whole: bool = False
    ) -> JsonObject:
        """Return deltas as the fields of a message, or of a message's delta.

        Args:
            calls: how many came before.
        """
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        out: JsonObject = {"content": content} if content or whole else {}
        if reasoning:
            out["reasoning_content"] = reasoning
        made: list[JsonObject] = []
        for number, delta in enumerate((d for d in deltas if isinstance(d, ToolCallDelta)), calls):
            function = {"name": delta.name, "arguments": delta.arguments}
            place: JsonObject = {} if whole else {"index": number}
            made.append({**place, "id": self._call_id(), "type": "function", "function": function})
        if made:
            out["tool_calls"] = made
        return out

    def _call_id(self) -> str:
        length = 24 if self.plan.calls is None else self.plan.calls.id_length
        token = secrets.token_hex(length)[:length]
        return token if length < 24 else f"call_{token}"


def _finish_reason(parser: ChoiceParser, reason: Any) -> Any:
    """Return why an answer ended; one that was cut off stays so, whatever calls it has."""
    return "tool_calls" if parser.calls and reason == "stop" else reason


def _schemas(tools: object) -> ToolSchemas:
    """Return the parameters' schema of each function among a request's tools."""
    out: dict[str, Mapping[str, object]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            out[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return out
