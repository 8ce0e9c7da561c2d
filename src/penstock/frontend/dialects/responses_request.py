"""Responses request: turns a request of OpenAI's responses API into that of a chat completion."""

from collections.abc import Iterable

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
    "conversation": "name the last response as previous_response_id",
    "prompt": "send the prompt's text itself",
    "top_logprobs": "chat completions have log-probabilities",
}
"""Fields that are refused where they are set -> why."""
IGNORED = frozenset(
    {"include", "max_tool_calls", "moderation", "prompt_cache_options", "prompt_cache_retention", "service_tier"}
    | {"stream_options", "truncation", "context_management"}
)
"""Fields without an effect; a prompt that is too long is refused whatever ``truncation`` says."""
HONOURED = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text"}
    | {"reasoning", "previous_response_id", "store", "background", "metadata", "stream", "temperature", "top_p"}
    | {"user", "safety_identifier", "prompt_cache_key"}
)
_AS_THEY_ARE = ("temperature", "top_p", "user", "safety_identifier", "prompt_cache_key")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_of(fields: JsonObject, history: list[JsonObject]) -> JsonObject:
    """Return the chat completion's body.

    Args:
        history: messages of the conversation that it goes on.
    Raises:
        ClientError: 400, naming the field.
    """
    refuse(fields, REFUSED)
    chat = passed_on(fields, HONOURED | IGNORED | REFUSED.keys())
    chat |= {name: fields[name] for name in _AS_THEY_ARE if fields.get(name) is not None}
    instructions = field_of(fields, "instructions", str)
    begun: list[JsonObject] = [{"role": "system", "content": instructions}] if instructions else []
    chat["model"] = needed(fields, "model", str)
    chat["messages"] = _one_system([*begun, *history, *messages_of(fields)])
    if fields.get("max_output_tokens") is not None:
        chat["max_tokens"] = field_of(fields, "max_output_tokens", int)
    chat |= _tools(fields) | _format(field_of(fields, "text", dict) or {})
    effort = field_of(field_of(fields, "reasoning", dict) or {}, "effort", str, "reasoning.")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if fields.get("stream"):
        chat["stream"] = fields["stream"]
    return chat


def messages_of(fields: JsonObject) -> list[JsonObject]:
    """Return the new messages of a request.

    Raises:
        ClientError: 400, naming the item.
    """
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return chat_messages(objects_of(needed(fields, "input", list), "input"))


def chat_messages(items: Iterable[JsonObject]) -> list[JsonObject]:
    """Return items as a chat's messages; what the model said in one turn becomes one message.

    Raises:
        ClientError: 400, naming the item.
    """
    messages: list[JsonObject] = []
    for at, item in enumerate(items):
        where = f"input[{at}]."
        kind = field_of(item, "type", str, where) or "message"
        if kind == "message":
            role = needed(item, "role", str, where)
            if role not in _ROLES:
                raise rejected(f"{where}role must be user, assistant, system or developer", f"{where}role")
            content = _content(item, where)
            if role == "assistant":
                _turn(messages, "content", content)
            else:
                messages.append({"role": _ROLES[role], "content": content})
        elif kind == "function_call":
            function = {
                "name": needed(item, "name", str, where),
                "arguments": field_of(item, "arguments", str, where) or "{}",
            }
            turn = _turn(messages, "tool_calls", None)
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": needed(item, "call_id", str, where), "type": "function", "function": function})
        elif kind == "function_call_output":
            id = needed(item, "call_id", str, where)
            output = item.get("output")
            text = output if isinstance(output, str) else _content({"content": output}, where)
            messages.append({"role": "tool", "tool_call_id": id, "content": text})
        elif kind == "reasoning":
            passages = field_of(item, "content", list, where) or field_of(item, "summary", list, where) or []
            thoughts = "".join(needed(part, "text", str, where) for part in objects_of(passages, f"{where}content"))
            if thoughts:
                messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
        else:
            raise unserved(kind, f"{where}type", "the caller runs its own tools, which are functions")
    return messages


def _turn(messages: list[JsonObject], name: str, value: object) -> JsonObject:
    """Return the message of the model's present turn: the last one where it still lacks ``name``, or a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (last.get(name) is not None and value is not None):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    if value is not None:
        last[name] = value
    return last


def _content(item: JsonObject, where: str) -> str | list[JsonObject]:
    """Return a message's content: text where all of it is text, else parts."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for at, block in enumerate(objects_of(needed(item, "content", list, where), f"{where}content")):
        here = f"{where}content[{at}]."
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
        else:
            raise unserved(kind, f"{here}type", "a message has text, images by image_url, and audio")
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _one_system(messages: list[JsonObject]) -> list[JsonObject]:
    """Join the system messages at the beginning: most models' templates take one."""
    texts: list[str] = []
    for message in messages:
        if message["role"] != "system" or not isinstance(message["content"], str):
            break
        texts.append(message["content"])
    if len(texts) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]]


def _tools(fields: JsonObject) -> JsonObject:
    tools = objects_of(field_of(fields, "tools", list) or (), "tools")
    chat: JsonObject = {}
    for at, tool in enumerate(tools):
        where = f"tools[{at}]."
        kind = needed(tool, "type", str, where)
        if kind != "function":
            raise unserved(kind, f"{where}type", "the caller runs its own tools, which are functions")
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        chat.setdefault("tools", []).append({"type": "function", "function": function})
    choice = fields.get("tool_choice")
    if not tools or choice is None:
        return chat
    if isinstance(choice, dict):
        kind = needed(choice, "type", str, "tool_choice.")
        if kind == "allowed_tools":
            allowed = objects_of(needed(choice, "tools", list, "tool_choice."), "tool_choice.tools")
            names = [tool.get("name") for tool in allowed]
            chat["tools"] = [tool for tool in chat["tools"] if tool["function"].get("name") in names]
            choice = field_of(choice, "mode", str, "tool_choice.") or "auto"
        elif kind == "function":
            choice = {"type": "function", "function": {"name": needed(choice, "name", str, "tool_choice.")}}
        else:
            raise unserved(kind, "tool_choice.type", "the caller runs its own tools, which are functions")
    chat["tool_choice"] = choice
    if fields.get("parallel_tool_calls") is not None:
        chat["parallel_tool_calls"] = fields["parallel_tool_calls"]
    return chat


def _format(text: JsonObject) -> JsonObject:
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
