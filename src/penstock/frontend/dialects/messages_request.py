"""Messages request: turns a request of Anthropic's messages API into that of a chat completion."""

import re

import msgspec

from penstock.frontend.dialects.body_fields import (
    field_of,
    leave_out,
    name_ignored,
    needed,
    objects_of,
    passed_on,
    refuse,
    set_fields,
    speak,
    unserved,
)
from penstock.frontend.http.error_responses import rejected
from penstock.kernel.values import JsonObject

_DATE = re.compile(r"_[0-9]{8}\Z")
_TEXT, _COUNT = {"type": "string"}, {"type": "integer"}
_POINT = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
_FILES = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "insert_line": {**_COUNT, "description": "Line after which the text is inserted; 0 is the file's beginning."},
    "view_range": {**_POINT, "description": "First and last line to view; -1 is the file's end."},
}
_BUTTONS = ("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag")
_MOUSE = (*_BUTTONS, "mouse_move", "left_mouse_down", "left_mouse_up", "cursor_position", "scroll", "zoom")


def _command(*names: str) -> JsonObject:
    return {"command": {**_TEXT, "enum": list(names)}}


_TOOLS: dict[str, tuple[str, JsonObject, str]] = {
    "bash": (
        "Run a command in a bash shell that goes on between calls; restart starts the shell anew.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        "",
    ),
    "text_editor": (
        "View a file or a folder, create a file, replace text that occurs once in a file, or insert text into it.",
        {**_command("view", "create", "str_replace", "insert"), **_FILES},
        "command",
    ),
    "memory": (
        "View, create and change files below /memories, which last between conversations.",
        {
            **_command("view", "create", "str_replace", "insert", "delete", "rename"),
            **_FILES,
            "old_path": _TEXT,
            "new_path": _TEXT,
        },
        "command",
    ),
    "computer": (
        "Use a screen of {display_width_px} x {display_height_px} pixels, with mouse and keyboard.",
        {
            "action": {**_TEXT, "enum": ["screenshot", "key", "hold_key", "type", "wait", *_MOUSE]},
            "coordinate": _POINT,
            "start_coordinate": _POINT,
            "text": _TEXT,
            "duration": {"type": "number"},
            "scroll_direction": {**_TEXT, "enum": ["up", "down", "left", "right"]},
            "scroll_amount": _COUNT,
            "region": {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4},
        },
        "action",
    ),
}
"""Kind without its date -> what it does, its fields, and the one that each call has."""


def client_tool(kind: str, tool: JsonObject) -> JsonObject | None:
    """Return such a tool's description and parameters; None for a kind that only the vendor's own service runs."""
    known = _TOOLS.get(_DATE.sub("", kind))
    if known is None:
        return None
    description, properties, needed = known
    for name in ("display_width_px", "display_height_px"):
        description = description.replace(f"{{{name}}}", str(tool.get(name)))
    schema = set_fields(type="object", properties=properties, required=[needed] if needed else None)
    return {"description": description, "parameters": schema}


REFUSED = {
    "mcp_servers": "the caller runs its own tools",
    "container": "there are no containers",
    "thread": "send all messages of the conversation",
}
"""Fields that are refused where they are set -> why."""
IGNORED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("anthropic_version", "betas", "billing_policy", "cache_control", "diagnostics", "service_tier")),
    **dict.fromkeys(("fallback_credit_token", "user_profile_id", "workspace_id")),
    **dict.fromkeys(("compaction", "context_management", "fallbacks", "inference_geo"), ()),
    "speed": ("standard",),
}
"""Fields without an effect -> the values that ask for none; None: every value does: caching is automatic, for one."""
_INNER = {"thinking": ("type",), "output_config": ("effort", "format"), "metadata": ("user_id",)}
"""Objects of whose fields these are honoured."""
HONOURED = frozenset(
    {"model", "max_tokens", "messages", "system", "stream", "stop_sequences", "metadata", "tools", "tool_choice"}
    | {"thinking", "output_config", "output_format", "temperature", "top_p", "top_k"}
)
_AS_THEY_ARE = ("temperature", "top_p", "top_k")
_OF_THE_VENDOR = (
    "container_upload",
    "browser_state",
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_listing",
    "fallback",
)
"""Blocks that are left out of a turn of the user, beside results of the vendor's tools."""
_CHANGING = "x-anthropic-billing-header:"
"""Begins a system block that a coding agent writes anew for each request: it would spoil the cache of all behind it."""


def chat_of(fields: JsonObject, left_out: list[str], *, counted: bool = False) -> JsonObject:
    """Return the chat completion's body.

    Args:
        left_out: gets what of the request has no effect here.
        counted: only its prompt matters, so it need not say how much to generate.
    Raises:
        ClientError: 400, naming the field.
    """
    refuse(fields, REFUSED)
    name_ignored(fields, IGNORED, _INNER, left_out)
    chat = passed_on(fields, HONOURED | IGNORED.keys() | REFUSED.keys())
    if not counted:
        chat["max_tokens"] = needed(fields, "max_tokens", int)
    chat |= {name: fields[name] for name in _AS_THEY_ARE if fields.get(name) is not None}
    turns = _Turns(left_out)
    for position, message in enumerate(objects_of(needed(fields, "messages", list), "messages")):
        turns.add(message, f"messages[{position}]")
    tools = [*objects_of(field_of(fields, "tools", list) or (), "tools"), *turns.tools]
    functions = [each for at, tool in enumerate(tools) if (each := _tool_as_function(tool, at, left_out)) is not None]
    chat |= set_fields(
        model=needed(fields, "model", str),
        messages=_system(fields) + turns.messages,
        stop=field_of(fields, "stop_sequences", list) or None,
        user=field_of(field_of(fields, "metadata", dict) or {}, "user_id", str, "metadata."),
        tools=functions or None,
    )
    choice = field_of(fields, "tool_choice", dict)
    if choice is not None and tools:
        chat |= _choice(choice, {each["function"]["name"] for each in functions}, tools)
    thinking = field_of(fields, "thinking", dict)
    if thinking is not None:
        own = field_of(fields, "chat_template_kwargs", dict) or {}
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled", **own}
    config = field_of(fields, "output_config", dict) or {}
    effort = turns.effort or field_of(config, "effort", str, "output_config.")
    if effort is not None:
        chat["reasoning_effort"] = effort
    format = field_of(config, "format", dict, "output_config.") or field_of(fields, "output_format", dict)
    if format is not None:
        schema = needed(format, "schema", dict, "output_config.format.")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if fields.get("stream"):
        chat["stream"] = fields["stream"]
    return chat


def _system(fields: JsonObject) -> list[JsonObject]:
    system = fields.get("system")
    if system is None or isinstance(system, str):
        text = system
    else:
        blocks = objects_of(field_of(fields, "system", list) or (), "system")
        texts = [needed(block, "text", str, f"system[{at}].") for at, block in enumerate(blocks)]
        text = "\n\n".join(text for text in texts if not text.startswith(_CHANGING))
    return [{"role": "system", "content": text}] if text else []


class _Turns:
    """The turns of a conversation as a chat's messages.

    What an engine cannot be given is left out: blocks of tools that the vendor's service ran, and files, for which a
    text stands in. What nobody knows is refused in a user's turn, where it is what the user asked.
    """

    def __init__(self, left_out: list[str]) -> None:
        self.messages: list[JsonObject] = []
        self.tools: list[JsonObject] = []
        """Tools that a system message added between turns."""
        self.effort: str | None = None
        """Effort that a system message asked for, from there on."""
        self._left_out = left_out
        self._fleeting: list[JsonObject] = []
        """System messages that count for one turn of the user."""

    def add(self, message: JsonObject, where: str) -> None:
        role = needed(message, "role", str, f"{where}.")
        if role not in ("user", "assistant", "system"):
            raise rejected(f"{where}.role must be user, assistant or system", f"{where}.role")
        content = message.get("content")
        if role == "user":
            self.messages = [each for each in self.messages if all(each is not past for past in self._fleeting)]
            self._fleeting = []
        elif role == "system":
            config = field_of(message, "output_config", dict, f"{where}.") or {}
            self.effort = field_of(config, "effort", str, f"{where}.output_config.") or self.effort
            if content is None:
                return
        made = [{"role": role, "content": content}]
        if not isinstance(content, str):
            blocks = objects_of(needed(message, "content", list, f"{where}."), f"{where}.content")
            read = self._assistant if role == "assistant" else self._given
            made = read(role, blocks, f"{where}.content")
        if role == "assistant":
            speak(self.messages, made[0])
        else:
            self.messages += made
        if message.get("clear_at") == "next_user_message":
            self._fleeting += made

    def _assistant(self, role: str, blocks: list[JsonObject], where: str) -> list[JsonObject]:
        """Return what the model said: its words, its thoughts where it may read them again, and its calls."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[JsonObject] = []
        for at, block in enumerate(blocks):
            here = f"{where}[{at}]."
            kind = needed(block, "type", str, here)
            if kind == "text":
                texts.append(needed(block, "text", str, here))
            elif kind == "compaction":
                texts.append(field_of(block, "content", str, here) or "")
            elif kind == "thinking":
                thoughts.append(needed(block, "thinking", str, here))
            elif kind == "tool_use":
                arguments = msgspec.json.encode(field_of(block, "input", dict, here) or {}).decode()
                function = {"name": needed(block, "name", str, here), "arguments": arguments}
                calls.append({"id": needed(block, "id", str, here), "type": "function", "function": function})
            else:
                leave_out(self._left_out, "messages", kind)
        content = "".join(texts) if texts or not calls else None
        more = set_fields(reasoning_content="".join(thoughts) or None, tool_calls=calls or None)
        return [{"role": role, "content": content, **more}]

    def _given(self, role: str, blocks: list[JsonObject], where: str) -> list[JsonObject]:
        """Return a turn that the model did not make: the results of tools, each a message, then the rest."""
        results: list[JsonObject] = []
        parts: list[JsonObject] = []
        for at, block in enumerate(blocks):
            here = f"{where}[{at}]."
            if block.get("type") == "tool_result":
                id = needed(block, "tool_use_id", str, here)
                text = block.get("content") or ""
                if not isinstance(text, str):
                    inner = objects_of(needed(block, "content", list, here), f"{here}content")
                    given = self._parts(inner, f"{here}content")
                    parts += [part for part in given if part["type"] != "text"]  # a tool's message has only text
                    text = "\n".join(part["text"] for part in given if part["type"] == "text")
                text = text or ("The tool failed." if block.get("is_error") else "")
                results.append({"role": "tool", "tool_call_id": id, "content": text})
            else:
                parts += self._part(block, here)
        if not parts:
            return results
        if all(part["type"] == "text" for part in parts):
            return [*results, {"role": role, "content": "\n".join(part["text"] for part in parts)}]
        return [*results, {"role": role, "content": parts}]

    def _parts(self, blocks: list[JsonObject], where: str) -> list[JsonObject]:
        return [part for at, block in enumerate(blocks) for part in self._part(block, f"{where}[{at}].")]

    def _part(self, block: JsonObject, where: str) -> list[JsonObject]:
        """Return a block as parts of a chat's message."""
        kind = needed(block, "type", str, where)
        if kind == "text":
            return _text_parts(needed(block, "text", str, where))
        if kind in ("image", "document"):
            return self._of_source(block, kind, where)
        if kind == "search_result":
            inner = self._parts(objects_of(needed(block, "content", list, where), f"{where}content"), f"{where}content")
            return [*_text_parts(f"{block.get('title')}\n{block.get('source')}"), *inner]
        if kind == "tool_reference":
            return _text_parts(f"The tool {needed(block, 'tool_name', str, where)} is available.")
        if kind in ("tool_addition", "tool_removal"):
            tool = needed(block, "tool", dict, where)
            if tool.get("type") == "tool_definition":
                tool = needed(tool, "definition", dict, f"{where}tool.")
                self.tools.append(tool)
            name = tool.get("name") or tool.get("mcp_server_name") or tool.get("server_name")
            return _text_parts(f"The tool {name} is {'now' if kind == 'tool_addition' else 'no longer'} available.")
        if kind in _OF_THE_VENDOR or kind.endswith("_tool_result"):
            leave_out(self._left_out, "messages", kind)
            return []
        raise unserved(kind, where + "type", "a message has text, images, documents, search results and tool results")

    def _of_source(self, block: JsonObject, kind: str, where: str) -> list[JsonObject]:
        """Return an image, or a document's text; for what can't be read here a text says that it is not shown."""
        source = field_of(block, "source", dict, where) or {}
        held, here = source.get("type"), f"{where}source."
        about = [text for name in ("title", "context") if (text := field_of(block, name, str, where))]
        if kind == "image" and held == "url":
            return [{"type": "image_url", "image_url": {"url": needed(source, "url", str, here)}}]
        if kind == "image" and held == "base64":
            media, data = needed(source, "media_type", str, here), needed(source, "data", str, here)
            return [{"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}]
        if kind == "document" and held == "text":
            return _text_parts("\n".join([*about, needed(source, "data", str, here)]))
        if kind == "document" and held == "content":
            content = source.get("content")
            inner = _text_parts(content) if isinstance(content, str) else None
            if inner is None:
                blocks = objects_of(needed(source, "content", list, here), f"{here}content")
                inner = self._parts(blocks, f"{here}content")
            return [part for text in about for part in _text_parts(text)] + inner
        if held not in ("base64", "url", "file"):
            raise rejected(f"{here}type must be text, content, base64, url or file", f"{here}type")
        leave_out(self._left_out, "messages", kind)
        named = " ".join([kind, *about])
        return _text_parts(f"[The {named} is not shown: this model is given text and images only.]")


def _text_parts(text: str) -> list[JsonObject]:
    return [{"type": "text", "text": text}]


def _tool_as_function(tool: JsonObject, at: int, left_out: list[str]) -> JsonObject | None:
    """Return a tool as a chat's function, or None for one that only the vendor's service runs."""
    where = f"tools[{at}]."
    kind = field_of(tool, "type", str, where) or "custom"
    if kind == "custom":
        given = set_fields(
            description=field_of(tool, "description", str, where), parameters=needed(tool, "input_schema", dict, where)
        )
    elif (known := client_tool(kind, tool)) is not None:
        given = known
    else:
        leave_out(left_out, "tools", kind)
        return None
    strict = set_fields(strict=field_of(tool, "strict", bool, where))
    return {"type": "function", "function": {"name": needed(tool, "name", str, where), **given, **strict}}


def _choice(choice: JsonObject, functions: set[str], tools: list[JsonObject]) -> JsonObject:
    kind = needed(choice, "type", str, "tool_choice.")
    named: object = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
    if kind == "tool":
        name = needed(choice, "name", str, "tool_choice.")
        if name not in functions and any(tool.get("name") == name for tool in tools):
            raise unserved(name, "tool_choice.name", "only the vendor's own service runs that tool")
        named = {"type": "function", "function": {"name": name}}
    if named is None:
        raise rejected("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    if not functions:
        if kind == "any":
            raise unserved(kind, "tool_choice.type", "none of the tools is one that the caller runs itself")
        return {}
    return {"tool_choice": named, **({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})}
