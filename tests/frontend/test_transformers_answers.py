"""What Transformers' server 5.19 answers comes through: its streams without an end mark, its refusals without a type.

Recorded from it on a CPU; its names for ids, models and times are shortened.
"""

import json
from typing import Any

from aiohttp import web

from tests.frontend.stand import stand

USAGE = {"completion_tokens": 2, "prompt_tokens": 19, "total_tokens": 21}
BASE = {"id": "f590", "created": 1795948781, "model": "/models/tiny@main"}
WHOLE = {
    **BASE,
    "object": "chat.completion",
    "choices": [{"finish_reason": "length", "index": 0, "message": {"content": " 898 496", "role": "assistant"}}],
    "usage": USAGE,
}
CHUNKS = [
    {"choices": [{"delta": {"role": "assistant"}, "index": 0}]},
    {"choices": [{"delta": {"content": " 898"}, "index": 0}]},
    {"choices": [{"delta": {"content": " 496"}, "index": 0}]},
    {"choices": [{"delta": {}, "index": 0, "finish_reason": "length"}], "usage": USAGE},
]


async def as_transformers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if "nonsense" in body:
        return web.json_response({"detail": "Unexpected fields in the request: {'nonsense'}"}, status=422)
    if isinstance(body.get("prompt"), list):
        return web.json_response({"detail": "prompt must be a string."}, status=400)
    if not body.get("stream"):
        return web.json_response(WHOLE)
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for each in CHUNKS:
        chunk = {**BASE, "object": "chat.completion.chunk", "system_fingerprint": "", **each}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write_eof()
    return response


async def test_its_answers_come_whole_and_count_as_such() -> None:
    async with stand(card={"engine": "openai"}) as s:
        s.engines[0].reply = as_transformers
        answer = await s.chat()
        assert answer.status == 200 and await answer.json() == WHOLE
        lines = [line for line in (await (await s.chat(stream=True)).text()).split("\n\n") if line]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert lines[-1] == "data: [DONE]", "the end mark that clients wait for is ours"
        assert [chunk["choices"] for chunk in chunks] == [each["choices"] for each in CHUNKS]
        assert [(record.outcome, record.osl) for record in s.records] == [("ok", 2), ("ok", 2)]


async def test_its_refusals_are_the_clients_and_come_as_they_are() -> None:
    async with stand(card={"engine": "openai"}) as s:
        s.engines[0].reply = as_transformers
        refused = await s.chat(nonsense=1)
        assert (refused.status, await refused.json()) == (
            422,
            {"detail": "Unexpected fields in the request: {'nonsense'}"},
        )
        refused = await s.http.post("/v1/completions", json={"model": "m", "prompt": [1, 2]})
        assert (refused.status, await refused.json()) == (400, {"detail": "prompt must be a string."})
        assert s.service.cluster.status().workers[0].failures == 0
