"""Answers of a scripted chat engine that thinks, speaks and calls tools."""

import json
from typing import Any

from aiohttp import web

from tests.frontend.stand import ENGINE, Engine, Reply, chunk

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
]


def script(
    text: str = "",
    *,
    thinking: str = "",
    calls: list[Any] | None = None,
    finish: str = "stop",
    stop: str | None = None,
    breaks: bool = False,
) -> Reply:
    """Return an engine's behaviour: this answer, whole or in small pieces.

    Args:
        breaks: the stream breaks off in place of its end.
    """

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        message = {"role": "assistant", "content": text or None}
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls  # type: ignore[assignment]
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
            return web.json_response({"id": "a", "choices": [choice], "usage": USAGE})
        engine: Engine = request[ENGINE]
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        pieces = [chunk({"role": "assistant", "content": ""})]
        pieces += [chunk({"reasoning_content": word}) for word in _halves(thinking)]
        pieces += [chunk({"content": word}) for word in _halves(text)]
        for place, call in enumerate(calls or ()):
            function = {"name": call["function"]["name"], "arguments": ""}
            head = {"index": place, "id": call["id"], "type": "function", "function": function}
            pieces.append(chunk({"tool_calls": [head]}))
            for piece in _halves(call["function"]["arguments"]):
                pieces.append(chunk({"tool_calls": [{"index": place, "function": {"arguments": piece}}]}))
        if not breaks:
            last = {"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop}
            pieces.append(b"data: " + json.dumps({"id": "a", "choices": [last]}).encode() + b"\n\n")
            pieces.append(b"data: " + json.dumps({"id": "a", "choices": [], "usage": USAGE}).encode() + b"\n\n")
            pieces.append(b"data: [DONE]\n\n")
        engine.sent = b"".join(pieces)
        for piece in pieces:
            await response.write(piece)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    return reply


def _halves(text: str) -> list[str]:
    half = len(text) // 2
    return [part for part in (text[:half], text[half:]) if part]
