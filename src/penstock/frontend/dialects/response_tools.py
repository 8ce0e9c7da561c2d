"""Response tools: the tools of a responses request as a chat's functions, whose calls get their own names back.

A chat has functions with one name each. The responses API has more: namespaces of functions, custom tools that take a
text in place of JSON, and tools that its vendor's service runs itself. The last are left out, and the answer says so.
"""

import re
from typing import NamedTuple

from penstock.frontend.dialects.body_fields import field_of, leave_out, needed, objects_of, unserved
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.prompt.routing_hints import digest
from penstock.kernel.values import JsonObject

NAME_MAX = 64
"""Longest name of a function in characters, at OpenAI as at engines."""
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{NAME_MAX}}}")
_OTHER_SIGNS = re.compile(r"[^a-zA-Z0-9_-]")
_OWN = ("function", "custom")
"""Kinds of tools that the caller runs itself."""
_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ToolName(NamedTuple):
    """What a tool is called in the responses API; ``kind``: ``function`` or ``custom``."""

    kind: str
    name: str
    namespace: str | None = None


class ResponseTools:
    """The tools of one request.

    Args:
        fields: of the request; ``input`` may bring more tools (``additional_tools``, results of a search for tools).
        left_out: gets the kinds of tools that are left out.
    Raises:
        ClientError: 400, naming the tool.
    """

    def __init__(self, fields: JsonObject, left_out: list[str]) -> None:
        self._functions: dict[str, JsonObject] = {}
        self._names: dict[str, ToolName] = {}
        self._flat: dict[tuple[str, str | None], str] = {}
        items = fields.get("input")
        lists = [(fields, "")]
        for at, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict) and item.get("type") in ("additional_tools", "tool_search_output"):
                lists.append((item, f"input[{at}]."))
        tools = [
            (tool, f"{where}tools[{at}].")
            for holder, where in lists
            for at, tool in enumerate(objects_of(field_of(holder, "tools", list, where) or (), f"{where}tools"))
        ]
        for tool, _ in tools:
            if tool.get("type") == "function" and isinstance(tool.get("name"), str):
                self._flat[tool["name"], None] = tool["name"]  # a plain function keeps its name whatever follows
        for tool, where in tools:
            self._add(tool, where, left_out)

    def _add(self, tool: JsonObject, where: str, left_out: list[str], namespace: JsonObject | None = None) -> None:
        kind = needed(tool, "type", str, where)
        if kind == "namespace" and namespace is None:
            inner = objects_of(needed(tool, "tools", list, where), f"{where}tools")
            for at, each in enumerate(inner):
                # What the namespace is for is told once, with its first function, as the API tells it once.
                about = {
                    "name": needed(tool, "name", str, where),
                    "description": None if at else tool.get("description"),
                }
                self._add(each, f"{where}tools[{at}].", left_out, about)
            return
        if kind not in _OWN:
            leave_out(left_out, "tools", kind)
            return
        name = needed(tool, "name", str, where)
        space = None if namespace is None else namespace["name"]
        flat = self.flat(name, space)
        function = {key: tool[key] for key in ("description", "parameters", "strict") if key in tool}
        texts = [None if namespace is None else namespace["description"], field_of(tool, "description", str, where)]
        if kind == "custom":
            function = {"parameters": _ONE_TEXT}
            texts.append(_grammar(field_of(tool, "format", dict, where) or {}))
        if any(texts):
            function["description"] = "\n\n".join(text for text in texts if text)
        self._functions[flat] = {"type": "function", "function": {"name": flat, **function}}
        self._names[flat] = ToolName(kind, name, space)

    def flat(self, name: str, namespace: str | None) -> str:
        """Return the name of a tool's function, which is the same in each request of a conversation."""
        known = self._flat.get((name, namespace))
        if known is not None:
            return known
        flat = name if namespace is None else f"{namespace.rstrip('_')}__{name}"
        if flat in self._flat.values() or not _NAME.fullmatch(flat):
            mark = digest(f"{namespace}\n{name}")
            flat = f"{_OTHER_SIGNS.sub('_', flat)[: NAME_MAX - len(mark) - 1]}_{mark}"
        self._flat[name, namespace] = flat
        return flat

    def named(self, function: str) -> ToolName:
        """Return which tool a model's call is of."""
        return self._names.get(function) or ToolName("function", function)

    def chat_fields(self, fields: JsonObject) -> JsonObject:
        """Return ``tools`` and what a chat says with them.

        Raises:
            ClientError: 400: a tool must be called that nobody here can call.
        """
        functions, choice = self._functions, fields.get("tool_choice")
        if isinstance(choice, dict):
            kind = needed(choice, "type", str, "tool_choice.")
            if kind == "allowed_tools":
                allowed = objects_of(needed(choice, "tools", list, "tool_choice."), "tool_choice.tools")
                flats = {flat for each in allowed for flat in self._meant(each)}
                functions = {flat: each for flat, each in functions.items() if flat in flats}
                choice = field_of(choice, "mode", str, "tool_choice.") or "auto"
            elif kind in _OWN:
                name, meant = needed(choice, "name", str, "tool_choice."), self._meant(choice)
                if len(meant) != 1:
                    which = "none" if not meant else "several; give their namespace, too"
                    raise rejected(f"tool_choice names {quoted(name)}, of which tools has {which}", "tool_choice.name")
                choice = {"type": "function", "function": {"name": meant[0]}}
            else:
                raise unserved(kind, "tool_choice.type", "the caller runs its own tools, which are functions")
        if not functions:
            if choice == "required" and fields.get("tools"):
                raise unserved("required", "tool_choice", "none of the tools is one that the caller runs itself")
            return {}
        chat: JsonObject = {"tools": list(functions.values())}
        if choice is not None:
            chat["tool_choice"] = choice
        if fields.get("parallel_tool_calls") is not None:
            chat["parallel_tool_calls"] = fields["parallel_tool_calls"]
        return chat

    def _meant(self, choice: JsonObject) -> list[str]:
        """Return the functions of the tools that a choice names, whether by namespace and name or by name alone."""
        name, space = choice.get("name"), choice.get("namespace")
        if choice.get("type") == "namespace":
            return [flat for flat, tool in self._names.items() if tool.namespace == name]
        exact = [flat for flat, tool in self._names.items() if (tool.name, tool.namespace) == (name, space)]
        loose = [flat for flat, tool in self._names.items() if name in (flat, tool.name) and space is None]
        return exact or loose


def _grammar(format: JsonObject) -> str | None:
    """Return what a custom tool's format says in words: no engine of a chat is bound by it."""
    definition = format.get("definition")
    return f"The input follows this {format.get('syntax')} grammar:\n{definition}" if definition else None
