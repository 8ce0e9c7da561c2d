"""Messages request: turns a request of Anthropic's messages API into that of a chat completion."""

import msgspec

from penstock.frontend.dialects.body_fields import (
    field_of,
    needed,
    objects_of,
    passed_on,
    refuse,
    set_fields,
    unserved,
)
from penstock.frontend.http.error_responses import rejected
from penstock.kernel.values import JsonObject

REFUSED = {
    "mcp_servers": "the caller runs its own tools",
    "container": "there are no containers",
}
"""Fields that are refused where they are set -> why."""
IGNORED = frozenset(
    {"anthropic_version", "betas", "cache_control", "context_management", "diagnostics", "inference_geo", "speed"}
    | {"service_tier"}
)
"""Fields without an effect: caching is automatic, and the rest are ways of the vendor's own service."""
HONOURED = frozenset(
    {"model", "max_tokens", "messages", "system", "stream", "stop_sequences", "metadata", "tools", "tool_choice"}
    | {"thinking", "output_config", "output_format", "temperature", "top_p", "top_k"}
)
_AS_THEY_ARE = ("temperature", "top_p", "top_k")
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
    chat = passed_on(fields, HONOURED | IGNORED | REFUSED.keys())
    if not counted:
        chat["max_tokens"] = needed(fields, "max_tokens", int)
    chat |= {name: fields[name] for name in _AS_THEY_ARE if fields.get(name) is not None}
    chat |= set_fields(
        model=needed(fields, "model", str),
        messages=_system(fields) + _messages(needed(fields, "messages", list)),
        stop=field_of(fields, "stop_sequences", list) or None,
        user=field_of(field_of(fields, "metadata", dict) or {}, "user_id", str, "metadata."),
        tools=[_tool(tool, at) for at, tool in enumerate(objects_of(field_of(fields, "tools", list) or (), "tools"))]
        or None,
    )
    choice = field_of(fields, "tool_choice", dict)
    if choice is not None and "tools" in chat:
        chat |= _choice(choice)
    thinking = field_of(fields, "thinking", dict)
    if thinking is not None:
        own = field_of(fields, "chat_template_kwargs", dict) or {}
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled", **own}
    config = field_of(fields, "output_config", dict) or {}
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


def _messages(messages: list[object]) -> list[JsonObject]:
    chat: list[JsonObject] = []
    for position, message in enumerate(objects_of(messages, "messages")):
        where = f"messages[{position}]"
        role = needed(message, "role", str, f"{where}.")
        if role not in ("user", "assistant", "system"):
            raise rejected(f"{where}.role must be user or assistant", f"{where}.role")
        content = message.get("content")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
            continue
        blocks = objects_of(needed(message, "content", list, f"{where}."), f"{where}.content")
        if role == "assistant":
            chat.append(_assistant(blocks, f"{where}.content"))
        else:
            chat += _user(role, blocks, f"{where}.content")
    return chat


def _assistant(blocks: list[JsonObject], where: str) -> JsonObject:
    """Return what the model said: its words, its thoughts where it may read them again, and its calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]."
        kind = needed(block, "type", str, here)
        if kind == "text":
            texts.append(needed(block, "text", str, here))
        elif kind == "thinking":
            thoughts.append(needed(block, "thinking", str, here))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(field_of(block, "input", dict, here) or {}).decode()
            function = {"name": needed(block, "name", str, here), "arguments": arguments}
            calls.append({"id": needed(block, "id", str, here), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise unserved(kind, here + "type", "the caller runs its own tools")
    return {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        **set_fields(reasoning_content="".join(thoughts) or None, tool_calls=calls or None),
    }


def _user(role: str, blocks: list[JsonObject], where: str) -> list[JsonObject]:
    """Return a turn of the user: the results of tools, each a message, then the rest."""
    results: list[JsonObject] = []
    parts: list[JsonObject] = []
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]."
        if block.get("type") == "tool_result":
            id = needed(block, "tool_use_id", str, here)
            inner = block.get("content")
            if isinstance(inner, list):
                given = [_part(part, here) for part in objects_of(inner, f"{here}content")]
                parts += [part for part in given if part["type"] != "text"]  # a tool's message has only text
                inner = "\n".join(part["text"] for part in given if part["type"] == "text")
            text = inner if isinstance(inner, str) else ""
            results.append({"role": "tool", "tool_call_id": id, "content": text})
        else:
            parts.append(_part(block, here))
    if not parts:
        return results
    if all(part["type"] == "text" for part in parts):
        return [*results, {"role": role, "content": "\n".join(part["text"] for part in parts)}]
    return [*results, {"role": role, "content": parts}]


def _part(block: JsonObject, where: str) -> JsonObject:
    """Return a block as a part of a chat's message."""
    kind = needed(block, "type", str, where)
    if kind == "text":
        return {"type": "text", "text": needed(block, "text", str, where)}
    source = field_of(block, "source", dict, where) or {}
    held = source.get("type")
    if kind == "image" and held == "url":
        return {"type": "image_url", "image_url": {"url": needed(source, "url", str, f"{where}source.")}}
    if kind == "image" and held == "base64":
        media = needed(source, "media_type", str, f"{where}source.")
        data = needed(source, "data", str, f"{where}source.")
        return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
    if kind == "document" and held == "text":
        return {"type": "text", "text": needed(source, "data", str, f"{where}source.")}
    raise unserved(kind, where + "type", "a message has text, images (base64 or url), text documents and tool results")


def _tool(tool: JsonObject, at: int) -> JsonObject:
    where = f"tools[{at}]."
    kind = field_of(tool, "type", str, where) or "custom"
    if kind != "custom":
        raise unserved(kind, f"{where}type", "the caller runs its own tools, each with an input_schema")
    function = set_fields(
        name=needed(tool, "name", str, where),
        description=field_of(tool, "description", str, where),
        parameters=needed(tool, "input_schema", dict, where),
        strict=field_of(tool, "strict", bool, where),
    )
    return {"type": "function", "function": function}


def _choice(choice: JsonObject) -> JsonObject:
    kind = needed(choice, "type", str, "tool_choice.")
    named: object = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
    if kind == "tool":
        named = {"type": "function", "function": {"name": needed(choice, "name", str, "tool_choice.")}}
    if named is None:
        raise rejected("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return {"tool_choice": named, **({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})}
