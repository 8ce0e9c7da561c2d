"""JSON calls: tool formats whose calls are JSON objects (Hermes, Llama 3, Mistral, DeepSeek)."""

import re

from penstock.frontend.parsers.text_markers import BracketSpan
from penstock.frontend.parsers.tool_format import (
    NO_CALL,
    CallsRead,
    ToolCallDelta,
    ToolFormat,
    ToolSchemas,
    call_of,
    json_object,
    json_value,
    object_text,
)

_SPACE = re.compile(r"\s*")


def _spaces(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


class _SpanReader:
    """A reader whose calls are a bracketed value behind the marker; subclasses say where it opens and what it means."""

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        self._marker = marker
        self._schemas = schemas
        self._start = len(marker)
        self._span: BracketSpan | None = None
        self._end: int | None = None

    def read(self, text: str, final: bool) -> CallsRead | None:
        if self._span is None:
            place = _spaces(text, self._start)
            if place == len(text):
                return NO_CALL if final else None
            opened = self._opened(text, place, final)
            if not isinstance(opened, int):
                return opened
            self._start, self._span = opened, BracketSpan(opened)
        if self._end is None:
            self._end = self._span.end(text)
            if self._end is None:
                return self._cut(text) if final else NO_CALL if self._span.broken else None
        return self._calls(text, self._end, final)

    def _opened(self, text: str, place: int, final: bool) -> int | CallsRead | None:
        """Return the place of the opening bracket, or what `read` returns; ``place``: of the first non-space."""
        return place if text[place] == "{" else NO_CALL

    def _calls(self, text: str, end: int, final: bool) -> CallsRead | None:
        """Return the calls of the value before ``end``; None where more text is needed."""
        raise NotImplementedError

    def _cut(self, text: str) -> CallsRead:
        """Return the calls of a value that the text's end cut."""
        return NO_CALL


class _HermesReader(_SpanReader):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``"""

    _CLOSE = "</tool_call>"

    def _calls(self, text: str, end: int, final: bool) -> CallsRead | None:
        # The end of a call may be missing where the model stopped at it; the object is whole all the same.
        place = _spaces(text, end)
        rest = text[place : place + len(self._CLOSE)]
        if not final and rest != self._CLOSE and self._CLOSE.startswith(rest):
            return None
        call = call_of(json_object(text[self._start : end]))
        if call is None:
            return NO_CALL
        return CallsRead((call,), place + len(self._CLOSE) if rest == self._CLOSE else end)


class _LlamaReader(_SpanReader):
    """``{"name": ..., "parameters": {...}}``, by itself or behind ``<|python_tag|>``; several with ``;``

    Llama 3.1 also writes ``<function=name>{...}</function>``.
    """

    _KEYS = ('"name"', '"type"', '"arguments"', '"parameters"')
    _TAG = "<function="
    _NAME = re.compile(r"([\w.\-/]{1,256})>\s{0,8}(?=\{)")
    _NAME_BEGUN = re.compile(r"[\w.\-/]{0,256}(?:>\s{0,8})?\Z")
    _CLOSE = "</function>"

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        super().__init__(marker, schemas)
        if marker == "{":
            self._start = 0
        self._name: str | None = None

    def _opened(self, text: str, place: int, final: bool) -> int | CallsRead | None:
        if self._marker == self._TAG:
            head = self._NAME.match(text, self._start)
            if head is None:
                return None if not final and self._NAME_BEGUN.match(text, self._start) else NO_CALL
            self._name = head[1]
            return head.end()
        if text[place] != "{":
            return NO_CALL
        # Another object is let go at its first key, so that an answer in JSON does not wait for its end.
        key = text[_spaces(text, place + 1) :][: len(self._KEYS[-1])]
        if any(key.startswith(name) for name in self._KEYS):
            return place
        return None if not final and any(name.startswith(key) for name in self._KEYS) else NO_CALL

    def _calls(self, text: str, end: int, final: bool) -> CallsRead | None:
        if self._name is not None:
            place = _spaces(text, end)
            rest = text[place : place + len(self._CLOSE)]
            if not final and rest != self._CLOSE and self._CLOSE.startswith(rest):
                return None
            arguments = object_text(text[self._start : end])
            if arguments is None:
                return NO_CALL
            return CallsRead((ToolCallDelta(self._name, arguments),), place + len(rest) if rest == self._CLOSE else end)
        # Without a marker, any JSON object would be a call: only one of the request's functions is.
        call = call_of(json_object(text[self._start : end]), self._schemas if self._marker == "{" else None)
        return NO_CALL if call is None else CallsRead((call,), end)


class _MistralReader(_SpanReader):
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name{...}`` and ``[TOOL_CALLS]name[CALL_ID]x[ARGS]{...}``"""

    # Few spaces, so that a text of nothing but spaces is not searched again and again.
    _HEAD = re.compile(r"\s{0,8}([\w.\-/]{1,256})\s{0,8}(?:\[CALL_ID\]\s?\w{0,64}\s?)?(?:\[ARGS\]\s{0,8})?(?=\{)")
    _HEAD_BEGUN = re.compile(
        r"\s{0,8}[\w.\-/]{0,256}\s{0,8}(?:\[[A-Z_]{0,7}\]?\s?\w{0,64}\s{0,8}){0,2}\[?[A-Z_]{0,7}\Z"
    )

    _LIST_BEGUN = re.compile(r"\[\s{0,16}(?:\{\s{0,16}(?:\"(?:n(?:a(?:m(?:e\"?)?)?)?)?)?)?\Z")
    _LIST = re.compile(r"\[\s{0,16}\{\s{0,16}\"name\"")

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        super().__init__(marker, schemas)
        self._name: str | None = None
        if marker == "[":
            self._start = 0

    def _opened(self, text: str, place: int, final: bool) -> int | CallsRead | None:
        if self._marker == "[" and not self._LIST.match(text, place):
            return None if not final and self._LIST_BEGUN.match(text, place) else NO_CALL
        if text[place] == "[":
            return place
        head = self._HEAD.match(text, self._start)
        if head is None:
            return None if not final and self._HEAD_BEGUN.match(text, self._start) else NO_CALL
        self._name = head[1]
        return head.end()

    def _calls(self, text: str, end: int, final: bool) -> CallsRead | None:
        body = text[self._start : end]
        if self._name is not None:
            arguments = object_text(body)
            return NO_CALL if arguments is None else CallsRead((ToolCallDelta(self._name, arguments),), end)
        return self._listed(body, end)

    def _cut(self, text: str) -> CallsRead:
        # The list may be cut at its bracket, which some engines take for the end of the answer.
        return NO_CALL if self._name is not None else self._listed(text[self._start :] + "]", len(text))

    def _listed(self, body: str, end: int) -> CallsRead:
        values = json_value(body)
        known = self._schemas if self._marker == "[" else None
        calls = [call_of(value, known) for value in values] if isinstance(values, list) else []
        whole = tuple(call for call in calls if call is not None)
        return CallsRead(whole, end) if whole and len(whole) == len(calls) else NO_CALL


class _DeepSeekReader:
    """V3: ``function<sep>name``, a fenced JSON object. V3.1: ``name<sep>{...}``. Both between two special tokens."""

    _SEP = "<｜tool▁sep｜>"
    _CLOSE = "<｜tool▁call▁end｜>"
    _FENCE = re.compile(r"```\w*\s")

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        self._start = len(marker)
        self._place = self._start

    def read(self, text: str, final: bool) -> CallsRead | None:
        end = text.find(self._CLOSE, self._place)
        if end < 0:
            self._place = max(self._start, len(text) - len(self._CLOSE))
            return NO_CALL if final else None
        head, _, body = text[self._start : end].partition(self._SEP)
        name = head.strip()
        fence = self._FENCE.search(body) if name == "function" else None
        if fence is not None:
            name, body = body[: fence.start()], body[fence.end() :].strip().removesuffix("```")
        arguments = object_text(body.strip())
        name = name.strip()
        if arguments is None or not name or "\n" in name:
            return NO_CALL
        return CallsRead((ToolCallDelta(name, arguments),), end + len(self._CLOSE))


HERMES = ToolFormat(starts=("<tool_call>",), reader=_HermesReader)
LLAMA3_JSON = ToolFormat(
    starts=("<|python_tag|>", "<function="),
    bare=("{",),
    behind_text=True,
    wrappers=(";",),
    reader=_LlamaReader,
    special=True,
)
MISTRAL = ToolFormat(starts=("[TOOL_CALLS]",), bare=("[",), reader=_MistralReader, special=True, id_length=9)
DEEPSEEK = ToolFormat(
    starts=("<｜tool▁call▁begin｜>",),
    wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    reader=_DeepSeekReader,
    special=True,
)
