"""Streams as the vendors' clients expect them: what each event has, in order, and of which type.

OpenAI: streaming events of responses; Anthropic: streaming messages with text, tool use and thinking. They are written
down from what is known of those APIs, not taken from a live service. A client may rely on every field that stands here.
"""

from typing import Any

Events = list[tuple[str, Any]]
"""Events of a stream: name and data; the name is "" where a stream has data alone."""

_MESSAGE = {
    "id": "msg_01",
    "type": "message",
    "role": "assistant",
    "content": [],
    "model": "m",
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 25, "output_tokens": 1},
}


def _block(index: int, block: Any, *deltas: Any) -> Events:
    start = {"type": "content_block_start", "index": index, "content_block": block}
    grown = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    events: list[Any] = [start, *grown, {"type": "content_block_stop", "index": index}]
    return [(event["type"], event) for event in events]


MESSAGES: Events = [
    ("message_start", {"type": "message_start", "message": _MESSAGE}),
    *_block(0, {"type": "thinking", "thinking": ""}, *[{"type": "thinking_delta", "thinking": "Let"}] * 2),
    *_block(1, {"type": "text", "text": ""}, *[{"type": "text_delta", "text": "Okay"}] * 2),
    *_block(
        2,
        {"type": "tool_use", "id": "toolu_01", "name": "weather", "input": {}},
        *[{"type": "input_json_delta", "partial_json": '{"city":'}] * 2,
    ),
    (
        "message_delta",
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 89},
        },
    ),
    ("message_stop", {"type": "message_stop"}),
]

_RESPONSE = {
    "id": "resp_67",
    "object": "response",
    "created_at": 1741487325,
    "status": "in_progress",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "metadata": {},
}
_USAGE = {
    "input_tokens": 37,
    "output_tokens": 11,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 48,
}
_AT = {"item_id": "msg_67", "output_index": 0, "content_index": 0}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def _item(item: dict[str, Any], kind: str, name: str) -> Events:
    """Return the events of an item with one part, whose text comes in two deltas."""
    end = {**item, "content": [_part(kind, "Hi")]} | ({"status": "completed"} if "status" in item else {})
    return [
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.content_part.added", {**_AT, "part": _part(kind, "")}),
        *[(f"response.{name}.delta", {**_AT, "delta": "Hi"})] * 2,
        (f"response.{name}.done", {**_AT, "text": "Hi"}),
        ("response.content_part.done", {**_AT, "part": _part(kind, "Hi")}),
        ("response.output_item.done", {"output_index": 0, "item": end}),
    ]


_CALL = {
    "type": "function_call",
    "id": "fc_67",
    "call_id": "call_X",
    "name": "weather",
    "arguments": "",
    "status": "in_progress",
}
_IN_CALL = {"item_id": "fc_67", "output_index": 0}
_ENDED = {**_RESPONSE, "status": "completed", "usage": _USAGE}
RESPONSES: Events = [
    (name, {"type": name, "sequence_number": 0, **data})
    for name, data in (
        ("response.created", {"response": _RESPONSE}),
        ("response.in_progress", {"response": _RESPONSE}),
        *_item({"id": "rs_67", "type": "reasoning", "summary": [], "content": []}, "reasoning_text", "reasoning_text"),
        *_item(
            {"id": "msg_67", "type": "message", "status": "in_progress", "role": "assistant", "content": []},
            "output_text",
            "output_text",
        ),
        ("response.output_item.added", {"output_index": 0, "item": _CALL}),
        *[("response.function_call_arguments.delta", {**_IN_CALL, "delta": '{"'})] * 2,
        ("response.function_call_arguments.done", {**_IN_CALL, "arguments": "{}"}),
        ("response.output_item.done", {"output_index": 0, "item": {**_CALL, "status": "completed"}}),
        ("response.completed", {"response": _ENDED}),
    )
]
