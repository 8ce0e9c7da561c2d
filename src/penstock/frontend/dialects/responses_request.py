"""Responses request: turns a request of OpenAI's responses API into that of a chat completion."""

from collections.abc import Iterable, Iterator

import msgspec

from penstock.frontend.dialects.body_fields import (
    custom_arguments,
    field_of,
    leave_out,
    mended,
    name_ignored,
    needed,
    objects_of,
    passed_on,
    refuse,
    set_fields,
    speak,
    unserved,
)
from penstock.frontend.dialects.dialect_answer import new_id
from penstock.frontend.dialects.response_tools import ResponseTools
from penstock.frontend.http.error_responses import rejected
from penstock.kernel.values import JsonObject

REFUSED = {
    "conversation": "name the last response as previous_response_id",
    "prompt": "send the prompt's text itself",
    "top_logprobs": "chat completions have log-probabilities",
}
"""Fields that are refused where they are set -> why."""
IGNORED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("client_metadata", "max_tool_calls", "stream_options")),
    **dict.fromkeys(("context_management", "include", "moderation", "prompt_cache_options"), ()),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
"""Fields without an effect -> the values that ask for none; None: every value does."""
_INNER = {"reasoning": ("effort",), "text": ("format", "verbosity")}
"""Objects of whose fields these are honoured."""
HONOURED = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text"}
    | {"reasoning", "previous_response_id", "store", "background", "metadata", "stream", "temperature", "top_p"}
    | {"user", "safety_identifier", "prompt_cache_key"}
)
_AS_THEY_ARE = ("temperature", "top_p", "user", "safety_identifier", "prompt_cache_key")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_NAMED_CALLS = ("function_call", "custom_tool_call")
_CALLS = (*_NAMED_CALLS, "local_shell_call", "shell_call", "apply_patch_call")
"""Calls that callers carry out; the item of what came of one has the same name with ``_output``."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_of(fields: JsonObject, history: list[JsonObject], tools: ResponseTools, left_out: list[str]) -> JsonObject:
    """Return the chat completion's body.

    Args:
        history: items of the conversation that it goes on.
        left_out: gets what of the request has no effect here.
    Raises:
        ClientError: 400, naming the field.
    """
    refuse(fields, REFUSED)
    name_ignored(fields, IGNORED, _INNER, left_out)
    chat = passed_on(fields, HONOURED | IGNORED.keys() | REFUSED.keys())
    chat |= {name: fields[name] for name in _AS_THEY_ARE if fields.get(name) is not None}
    instructions = field_of(fields, "instructions", str)
    begun: list[JsonObject] = [{"role": "system", "content": instructions}] if instructions else []
    chat["model"] = needed(fields, "model", str)
    messages = chat_messages(history, tools, []) + chat_messages(items_of(fields), tools, left_out)
    chat["messages"] = begun + messages
    if fields.get("max_output_tokens") is not None:
        chat["max_tokens"] = field_of(fields, "max_output_tokens", int)
    text = field_of(fields, "text", dict) or {}
    chat |= tools.chat_fields(fields) | _response_format(text)
    chat |= set_fields(metadata=field_of(fields, "metadata", dict), verbosity=field_of(text, "verbosity", str, "text."))
    effort = field_of(field_of(fields, "reasoning", dict) or {}, "effort", str, "reasoning.")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if fields.get("stream"):
        chat["stream"] = fields["stream"]
    return chat


def items_of(fields: JsonObject) -> list[JsonObject]:
    """Return the new items of a request.

    Raises:
        ClientError: 400, naming the item.
    """
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return objects_of(needed(fields, "input", list), "input")


def listed(items: Iterable[JsonObject]) -> Iterator[JsonObject]:
    """Yield a request's items as the API lists them: each with an id, a status, and content in parts."""
    for item in items:
        kind, content = item.get("type") or "message", item.get("content")
        if isinstance(content, str):
            output = (
                {"type": "output_text", "annotations": []}
                if item.get("role") == "assistant"
                else {"type": "input_text"}
            )
            content = [{**output, "text": content}]
        named = {"id": item.get("id") or new_id("msg" if kind == "message" else "item"), "type": kind}
        yield {"status": "completed", **item, **named, **set_fields(content=content)}


def chat_messages(items: Iterable[JsonObject], tools: ResponseTools, left_out: list[str]) -> list[JsonObject]:
    """Return items as a chat's messages; what the model said in one turn becomes one message.

    Items of tools that the vendor's service runs are left out: their results are in what the model said next.

    Raises:
        ClientError: 400, naming the item.
    """
    messages: list[JsonObject] = []
    for at, item in enumerate(items):
        where = f"input[{at}]."
        kind = field_of(item, "type", str, where) or "message"
        if kind in ("message", "agent_message"):
            role = "user" if kind == "agent_message" else needed(item, "role", str, where)
            if role not in _ROLES:
                raise rejected(f"{where}role must be user, assistant, system or developer", f"{where}role")
            content = _item_content(item, where, left_out)
            if role == "assistant":
                speak(messages, {"content": content})
            else:
                messages.append({"role": _ROLES[role], "content": content})
        elif kind in _CALLS:
            id = needed(item, "call_id", str, where)
            function = _call_of(item, kind, tools, where)
            speak(messages, {"tool_calls": [{"id": id, "type": "function", "function": function}]})
        elif kind.removesuffix("_output") in _CALLS:
            # The output of a local shell has the call's id as its own.
            id = needed(item, "id" if item.get("call_id") is None else "call_id", str, where)
            messages.append({"role": "tool", "tool_call_id": id, "content": _output_of(item, kind, where, left_out)})
        elif kind == "reasoning":
            passages = field_of(item, "content", list, where) or field_of(item, "summary", list, where) or []
            thoughts = "".join(needed(part, "text", str, where) for part in objects_of(passages, f"{where}content"))
            if thoughts:
                speak(messages, {"reasoning_content": thoughts})
        elif kind == "item_reference":
            raise unserved(kind, f"{where}type", "send the item itself, or go on from previous_response_id")
        elif kind != "additional_tools":
            leave_out(left_out, "input", kind)
    return messages


def _call_of(item: JsonObject, kind: str, tools: ResponseTools, where: str) -> JsonObject:
    """Return the function and the arguments of a call that the caller carried out."""
    if kind not in _NAMED_CALLS:  # of a tool that the vendor's models know without its definition
        given = item.get("action") or item.get("operation") or {}
        return {"name": kind.removesuffix("_call"), "arguments": msgspec.json.encode(given).decode()}
    name = tools.flat(needed(item, "name", str, where), field_of(item, "namespace", str, where))
    if kind == "custom_tool_call":
        return {"name": name, "arguments": custom_arguments(field_of(item, "input", str, where) or "")}
    return {"name": name, "arguments": mended(field_of(item, "arguments", str, where) or "")}


def _output_of(item: JsonObject, kind: str, where: str, left_out: list[str]) -> str | list[JsonObject]:
    """Return the content of a tool's message."""
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and kind.removesuffix("_output") in _NAMED_CALLS:
        return _item_content(item, where, left_out, "output")
    return msgspec.json.encode(output or item.get("status")).decode()


def _item_content(item: JsonObject, where: str, left_out: list[str], name: str = "content") -> str | list[JsonObject]:
    """Return a message's content: text where all of it is text, else parts."""
    content = item.get(name)
    if isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for at, block in enumerate(objects_of(needed(item, name, list, where), f"{where}{name}")):
        here = f"{where}{name}[{at}]."
        kind = needed(block, "type", str, here)
        if kind in _TEXTS:
            parts.append({"type": "text", "text": needed(block, "text", str, here)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": needed(block, "refusal", str, here)})
        elif kind == "input_image" and isinstance(block.get("image_url"), str):
            image = {"url": block["image_url"], **set_fields(detail=field_of(block, "detail", str, here))}
            parts.append({"type": "image_url", "image_url": image})
        elif kind == "input_audio":
            parts.append({"type": "input_audio", "input_audio": needed(block, "input_audio", dict, here)})
        elif kind in ("input_file", "input_image"):
            leave_out(left_out, "input", kind)
            named = field_of(block, "filename", str, here) or kind.removeprefix("input_")
            parts.append(
                {"type": "text", "text": f"[{named} is not shown: this model is given text, images and audio only.]"}
            )
        elif item.get("role") in ("user", "system", "developer"):
            raise unserved(kind, f"{here}type", "a message has text, images, files and audio")
        else:  # no person wrote it, and a conversation that has it goes on
            leave_out(left_out, "input", kind)
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _response_format(text: JsonObject) -> JsonObject:
    format = field_of(text, "format", dict, "text.")
    kind = None if format is None else needed(format, "type", str, "text.format.")
    if format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        raise rejected("text.format.type must be text, json_object or json_schema", "text.format.type")
    schema = {name: format[name] for name in ("name", "description", "schema", "strict") if name in format}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
