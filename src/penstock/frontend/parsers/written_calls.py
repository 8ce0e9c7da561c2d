"""Written calls: tool formats whose calls are no JSON (Qwen's XML, lists of Python calls)."""

import ast
import math
import re
import warnings

from penstock.frontend.parsers.parsed_deltas import ToolCallDelta
from penstock.frontend.parsers.text_markers import BracketSpan
from penstock.frontend.parsers.tool_format import (
    NO_CALL,
    CallsRead,
    ToolFormat,
    ToolSchemas,
    arguments_text,
    json_value,
)


class _QwenReader:
    """``<function=name><parameter=a>value</parameter>...</function>``"""

    _CLOSE = "</function>"
    _HEAD = re.compile(r"<function=([^>\n]+)>\s*")
    # A value ends where what follows can only be the next parameter or the end: it may be text about this very format.
    _PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.S)
    _WHOLE = re.compile(r"(?:</parameter>|<function=[^>\n]+>)\s*\Z")

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self._place = 0

    def read(self, text: str, final: bool) -> CallsRead | None:
        while (end := text.find(self._CLOSE, self._place)) >= 0:
            self._place = end + len(self._CLOSE)
            if self._WHOLE.search(text, max(0, end - 400), end):
                return self._call(text[:end], self._place)
        self._place = max(self._place, len(text) - len(self._CLOSE))
        return NO_CALL if final else None

    def _call(self, body: str, end: int) -> CallsRead:
        head = self._HEAD.match(body)
        if head is None:
            return NO_CALL
        name, place = head[1].strip(), head.end()
        arguments: dict[str, object] = {}
        while place < len(body):
            parameter = self._PARAMETER.match(body, place)
            if parameter is None:
                return NO_CALL
            arguments[parameter[1].strip()] = _typed_value(
                _trimmed(parameter[2]), self._types(name, parameter[1].strip())
            )
            place = parameter.end()
        return CallsRead((ToolCallDelta(name, arguments_text(arguments)),), end)

    def _types(self, name: str, parameter: str) -> tuple[str, ...]:
        """Return the JSON types that the request allows for a parameter; none where it does not say."""
        properties = self._schemas.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        if not isinstance(schema, dict):
            return ()
        options = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
        types: list[str] = []
        for option in options:
            kind = option.get("type") if isinstance(option, dict) else None
            types += [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
        return tuple(kind for kind in types if isinstance(kind, str))


def _trimmed(value: str) -> str:
    """Return a value without the line break that the format puts before and behind it."""
    return value.removeprefix("\n").removesuffix("\n")


_JSON_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def _typed_value(text: str, types: tuple[str, ...]) -> object:
    """Return a parameter's value in one of the allowed types; as text where it is of none of them."""
    kinds = [kind for kind in types if kind in _JSON_KINDS]
    if not kinds:
        return text
    plain = text.strip()
    value = json_value({"True": "true", "False": "false", "None": "null"}.get(plain, plain))
    for kind in kinds:
        if isinstance(value, _JSON_KINDS[kind]) and (isinstance(value, bool) <= (kind == "boolean")):
            return value if value is not None or plain in ("null", "None") else text
    return text


class _PythonicReader:
    """``[f(a=1), g(b="x")]`` as the whole answer."""

    _HEAD = re.compile(r"\[\s{0,16}([A-Za-z_][\w.]{0,127})\(")
    _HEAD_BEGUN = re.compile(r"\[\s{0,16}[\w.]{0,128}\Z")

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self._start = len(marker) - 1
        self._span: BracketSpan | None = None

    def read(self, text: str, final: bool) -> CallsRead | None:
        if self._span is None:
            head = self._HEAD.match(text, self._start)
            if head is None:
                return None if not final and self._HEAD_BEGUN.match(text, self._start) else NO_CALL
            if head[1] not in self._schemas:
                return NO_CALL
            self._span = BracketSpan(self._start, "\"'")
        end = self._span.end(text)
        if end is None:
            return NO_CALL if final or self._span.broken else None
        try:
            with warnings.catch_warnings():  # such as those of an unknown escape in a model's string
                warnings.simplefilter("ignore")
                tree = ast.parse(text[self._start : end], mode="eval").body
            calls = tuple(self._call(node) for node in tree.elts) if isinstance(tree, ast.List) else ()
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return NO_CALL
        return CallsRead(calls, end) if calls else NO_CALL

    def _call(self, node: ast.expr) -> ToolCallDelta:
        """Return one call.

        Raises:
            ValueError: it is none of the request's functions, or has arguments that are no literals with names.
        """
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
            raise ValueError("no call with named arguments")
        name = ast.unparse(node.func)
        if name not in self._schemas:
            raise ValueError(f"{name} is none of the request's functions")
        arguments: dict[str, object] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError("arguments without names")
            arguments[keyword.arg] = _literal(keyword.value)
        return ToolCallDelta(name, arguments_text(arguments))


_WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> object:
    """Return a literal's value; models also write JSON's words for truth and nothing.

    Raises:
        ValueError: it is no literal of JSON's types.
    """
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        out: dict[str, object] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            name = None if key is None else _literal(key)
            if not isinstance(name, str):
                raise ValueError("a key that is no text")
            out[name] = _literal(item)
        return out
    value: object = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None) or value in (math.inf, -math.inf):
        raise ValueError("no value of JSON")
    return value


QWEN3_CODER = ToolFormat(starts=("<function=",), wrappers=("<tool_call>", "</tool_call>"), reader=_QwenReader)
PYTHONIC = ToolFormat(starts=("<|python_start|>[",), bare=("[",), wrappers=("<|python_end|>",), reader=_PythonicReader)
