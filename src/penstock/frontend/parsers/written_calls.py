"""Written calls: tool formats whose calls are no JSON (Qwen's XML, lists of Python calls)."""

import ast
import math
import re
import warnings
from collections.abc import Mapping

from penstock.frontend.parsers.text_markers import BracketSpan
from penstock.frontend.parsers.tool_format import (
    NO_CALL,
    CallsRead,
    ToolCallDelta,
    ToolFormat,
    ToolSchemas,
    arguments_text,
    json_value,
)


class _QwenReader:
    """``<function=name><parameter=a>value</parameter>...</function>``

    A value may be text about this very format: it goes on to the end mark of its own, and no call begins in it.
    """

    # The one of the whole stands alone where a model left the function's out.
    _CLOSE = re.compile(r"</function>|</tool_call>")
    _HEAD = re.compile(r"<function=([^>\n]+)>\s*")
    _OPENING = re.compile(r"<parameter=([^>\n]+)>")
    _MARK = re.compile(r"<parameter=[^>\n]+>|</parameter>\s*")
    # Where a model left an end mark out, the next parameter's line ends a value, or the end.
    _UNCLOSED = re.compile(r"</parameter>\s*|\n\s*(?=<parameter=)|\Z")
    _WHOLE = re.compile(r"(?:</parameter>|<function=[^>\n]+>)\s*\Z")
    _LAST = re.compile(r"</function>\s*(?:</tool_call>\s*)?\Z")

    def __init__(self, marker: str, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self._place = self._counted = self._open = 0
        self._unsure: tuple[int, int] | None = None
        """The call's first end within a value that is still open: it may be part of that value."""

    def read(self, text: str, final: bool) -> CallsRead | None:
        while (close := self._CLOSE.search(text, self._place)) is not None:
            at, self._place = close.span()
            if not self._WHOLE.search(text, max(0, at - 400), at):
                continue
            self._open += len(self._OPENING.findall(text, self._counted, at))
            self._open -= text.count("</parameter>", self._counted, at)
            self._counted = at
            end = self._place if close[0] == "</function>" else at
            if self._open <= 0:
                return self._call(text[:at], end)
            self._unsure = self._unsure or (at, end)
        self._place = max(self._place, len(text) - len("</tool_call>"))
        if not final:
            return None
        last = self._LAST.search(text)
        if self._unsure is None and last is not None:
            self._unsure = last.start(), last.start() + len("</function>")
        read = NO_CALL if self._unsure is None else self._call(text[: self._unsure[0]], self._unsure[1])
        return read if read.calls or not read.end else CallsRead(end=len(text))

    def _call(self, body: str, end: int) -> CallsRead:
        """Return the call; none, and the place behind it, where what belongs to which parameter is a guess."""
        head = self._HEAD.match(body)
        if head is None:
            return NO_CALL
        name, place = head[1].strip(), head.end()
        schema = self._schemas.get(name, {})
        properties = _object_of(schema.get("properties"))
        unclosed = len(self._OPENING.findall(body)) > body.count("</parameter>")
        values: dict[str, str] = {}
        while place < len(body):
            opening = self._OPENING.match(body, place)
            stop = None if opening is None else self._value_end(body, opening.end(), unclosed)
            if opening is None or stop is None:
                return NO_CALL
            key, value = opening[1].strip(), _trimmed(body[opening.end() : stop.start()])
            if unclosed and (key not in properties or key in values or "<function=" in value):
                return CallsRead(end=end)
            values[key] = value
            place = stop.end()
        before = [value.partition("<function=")[0] for value in values.values()]
        swallowed = {mark.strip() for value in before for mark in self._OPENING.findall(value)}
        if not swallowed.isdisjoint(properties.keys() - (() if unclosed else values.keys())):
            return CallsRead(end=end)
        typed = {key: _typed_value(text, types_of(properties.get(key), schema)) for key, text in values.items()}
        return CallsRead((ToolCallDelta(name, arguments_text(typed)),), end)

    def _value_end(self, body: str, start: int, unclosed: bool) -> re.Match[str] | None:
        """Return the end mark of a value: before the next parameter or the end, and with its own marks in pairs."""
        if unclosed:
            return self._UNCLOSED.search(body, start)
        depth, first = 0, None
        for mark in self._MARK.finditer(body, start):
            if mark[0].startswith("<p"):
                depth += 1
                continue
            if mark.end() == len(body) or body.startswith("<parameter=", mark.end()):
                if depth == 0:
                    return mark
                first = first or mark
            depth -= 1
            if depth < 0 and first is not None:
                break
        return first


def _trimmed(value: str) -> str:
    """Return a value without the line break that the format puts before and behind it."""
    return value.removeprefix("\n").removesuffix("\n")


_KINDS = {
    **dict.fromkeys(("integer", "int", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(("number", "float", "double", "decimal"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("object", "dict", "map"), "object"),
    **dict.fromkeys(("array", "list", "tuple"), "array"),
    **dict.fromkeys(("string", "str"), "string"),
    **dict.fromkeys(("null", "none"), "null"),
}
"""Types of JSON schema, and the names that tools written in other languages give them."""
_DEPTH_MAX = 8
"""Most references of a schema that are followed: one may refer to itself."""


def types_of(schema: object, root: Mapping[str, object], depth: int = 0) -> tuple[str, ...]:
    """Return the types of JSON that a schema allows, in its order; none where it does not say.

    Args:
        root: the schema in which its references lie.
    """
    fields = _object_of(schema)
    if not fields or depth > _DEPTH_MAX:
        return ()
    kinds: list[str] = []
    named = fields.get("type")
    for kind in named if isinstance(named, list) else [named]:
        kinds += [_KINDS[kind.lower()]] if isinstance(kind, str) and kind.lower() in _KINDS else []
    if not kinds:
        values = fields.get("enum", [fields["const"]] if "const" in fields else [])
        for value in values if isinstance(values, list) else []:
            kinds += [kind for kind, of in _JSON_KINDS.items() if _is_of(value, kind, of)] or ["string"]
    below: list[object] = [_referred(fields["$ref"], root)] if "$ref" in fields else []
    for word in ("anyOf", "oneOf", "allOf"):
        options = fields.get(word)
        below += options if isinstance(options, list) else []
    for option in below:
        kinds += types_of(option, root, depth + 1)
    return tuple(dict.fromkeys(kinds))


def _referred(reference: object, root: Mapping[str, object]) -> object:
    """Return the schema to which a reference within the same document leads; None where it leads nowhere."""
    place: object = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        place = _object_of(place).get(step.replace("~1", "/").replace("~0", "~"))
    return place


def _object_of(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _is_of(value: object, kind: str, of: type | tuple[type, ...]) -> bool:
    return isinstance(value, of) and isinstance(value, bool) <= (kind == "boolean")


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
    if value is None and plain[:1] in ("{", "["):
        value = _python_value(plain)
    for kind in kinds:
        if _is_of(value, kind, _JSON_KINDS[kind]):
            return value if value is not None or plain in ("null", "None") else text
    return text


def _python_value(text: str) -> object:
    """Return the value of a literal as Python writes it; None where it is none."""
    try:
        return _literal_value(_parsed_expression(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _parsed_expression(text: str) -> ast.expr:
    with warnings.catch_warnings():  # such as those of an unknown escape in a model's string
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


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
            tree = _parsed_expression(text[self._start : end])
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
            raise ValueError(f"{name} is not one of the request's functions")
        arguments: dict[str, object] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise ValueError("an argument without a name, or twice")
            arguments[keyword.arg] = _literal_value(keyword.value)
        return ToolCallDelta(name, arguments_text(arguments))


_WORDS = {"true": True, "false": False, "null": None}


def _literal_value(node: ast.expr) -> object:
    """Return a literal's value; models also write JSON's words for truth and nothing.

    Raises:
        ValueError: it is no literal of JSON's types.
    """
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        out: dict[str, object] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            name = None if key is None else _literal_value(key)
            if not isinstance(name, str):
                raise ValueError("a key that is not text")
            out[name] = _literal_value(item)
        return out
    value: object = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None) or value in (math.inf, -math.inf):
        raise ValueError("no value of JSON")
    return value


QWEN3_CODER = ToolFormat(starts=("<function=",), wrappers=("<tool_call>", "</tool_call>"), reader=_QwenReader)
PYTHONIC = ToolFormat(starts=("<|python_start|>[",), bare=("[",), wrappers=("<|python_end|>",), reader=_PythonicReader)
