"""Is a chat's next turn prepared by the worker that has its blocks, and by nobody where that would be in the way?"""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.frontend.exchange import prefix_warming
from penstock.frontend.exchange.prefix_warming import SpokenMessage
from penstock.router.settings import HandoffSettings, RouterSettings
from tests.frontend.stand import Stand, answer_well, chunk, eventually, stand

HINT = {"agent_hints": {"speculative_prefill": True}}
QUESTION = {"role": "user", "content": "hello"}


def sent(s: Stand, engine: int = 0) -> list[Any]:
    return [json.loads(body) for body in s.engines[engine].bodies]


def outcome(s: Stand, request: str) -> str:
    """Return what explain says of the next turn."""
    s.service.bookkeeping.enter()
    explained = s.service.history.explain(request)
    assert explained is not None and explained.request is not None
    return explained.request.next_turn


async def metric(s: Stand, result: str) -> bool:
    text = await (await s.http.get("/metrics")).text()
    return f'penstock_prefix_warmings_total{{model="m",result="{result}"}} 1\n' in text


class Slow:
    """An engine that answers a request of one token only when it is allowed to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("max_tokens") == 1:
            await self.go.wait()
        return await answer_well(request, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_conversation_with_its_answer_goes_to_the_worker_that_served_it(stream: bool) -> None:
    async with stand(2) as s:
        more = {"stream": stream, "max_completion_tokens": 50, "temperature": 0.5, "priority": 7}
        reply = await s.chat(nvext=HINT, headers={"x-request-id": "r", "traceparent": "00-aa-bb-01"}, **more)
        await reply.read()
        assert "x-penstock-ignored-hints" not in reply.headers
        served = int(reply.headers["x-penstock-worker"][1])
        await eventually(lambda: "computed by" in outcome(s, "r"))
        first, second = sent(s, served)
        words = "t0 t1 t2 t3 t4 " if stream else "xxxxx"
        assert second["messages"] == [*first["messages"], {"role": "assistant", "content": words}]
        assert (second["max_tokens"], second["stream"], second["temperature"]) == (1, False, 0.5)
        assert not {"max_completion_tokens", "stream_options", "priority"} & second.keys()
        assert s.engines[served].headers[1]["x-request-id"] == "r-next"
        assert sent(s, 1 - served) == [] and len(s.records) == 1
        assert await metric(s, "done")


async def test_it_is_of_the_lowest_priority_and_ends_before_the_next_question() -> None:
    async with stand(card={"engine": "vllm", "labels": {"priority": "on"}}) as s:
        reply = await s.chat(nvext={**HINT, "extra_fields": ["worker_id"]}, headers={"x-request-id": "r"})
        told = (await reply.json())["nvext"]
        assert told["speculative_prefill"] == "e0" and "ignored_hints" not in told
        await eventually(lambda: len(sent(s)) == 2)
        assert sent(s)[1]["priority"] == 2**31 and sent(s)[1]["add_generation_prompt"] is False


async def test_after_a_hand_off_it_goes_to_the_worker_of_the_prefill() -> None:
    async def hand_over(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = await answer_well(request, body)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            found = json.loads(reply.body)  # type: ignore[attr-defined]
            return web.json_response({**found, "kv_transfer_params": {"do_remote_prefill": True}})
        return reply

    role: dict[str, Any] = {"engine": "vllm", "handoff": "completed", "layout": "l"}
    settings = ClusterSettings(
        models={"m": ModelSettings(pools={"main": PoolSettings()})},
        router=RouterSettings(handoff=HandoffSettings(conditional="off")),
    )
    async with stand(2, card={**role, "role": "prefill"}, settings=settings) as s:
        s.join(s.engines[1], **role, role="decode", epoch=2)
        for engine in s.engines:
            engine.reply = hand_over
        reply = await s.chat(nvext=HINT, headers={"x-request-id": "r"}, stream=True)
        await reply.read()
        assert reply.headers["x-penstock-prefill-worker"] == "e0"
        await eventually(lambda: "computed by e0" in outcome(s, "r"))
        before, following = sent(s)
        assert "kv_transfer_params" in before and "kv_transfer_params" not in following
        assert following["messages"][1]["content"] == "t0 t1 t2 t3 t4 " and len(sent(s, 1)) == 1


async def test_the_next_turn_ends_it_and_another_chat_does_not() -> None:
    async with stand() as s:
        s.engines[0].reply = Slow()
        await s.chat(nvext=HINT, headers={"x-request-id": "r"})
        await eventually(lambda: len(sent(s)) == 2)
        await s.chat("another")
        assert outcome(s, "r") == "" and not s.engines[0].hung_up.is_set()
        await s.chat(messages=[QUESTION, {"role": "assistant", "content": "as the client has it"}, QUESTION])
        await eventually(lambda: "the next turn had come" in outcome(s, "r"))
        await s.engines[0].hung_up.wait()
        assert await metric(s, "overtaken") and not s.service.exchanges.warming.open


async def test_a_busy_worker_is_left_alone_and_explain_says_so() -> None:
    async with stand() as s:
        busy = asyncio.Event()

        async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["messages"][0]["content"] == "long":
                await busy.wait()
            return await answer_well(request, body)

        s.engines[0].reply = reply
        other = asyncio.create_task(s.chat("long", stream=True))
        await eventually(lambda: len(sent(s)) == 1)
        await s.chat(nvext=HINT, headers={"x-request-id": "r"})
        assert outcome(s, "r").startswith("skipped, since worker e0 is busy")
        busy.set()
        await other
        assert len(sent(s)) == 2 and await metric(s, "skipped")


async def test_there_is_one_at_a_worker_and_it_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand() as s:
        s.engines[0].reply = Slow()
        monkeypatch.setattr(prefix_warming, "LIMIT", 0.2)
        await s.chat(nvext=HINT, headers={"x-request-id": "a"})
        await s.chat("other", nvext=HINT, headers={"x-request-id": "b"})
        assert "another chat's next turn" in outcome(s, "b")
        await eventually(lambda: "did not end it within 0.2 s" in outcome(s, "a"))
        assert await metric(s, "failed")


async def test_an_engine_that_refuses_costs_nothing_but_a_note() -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("max_tokens") == 1:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return await answer_well(request, body)

    async with stand() as s:
        s.engines[0].reply = refuse
        assert (await s.chat(nvext=HINT, headers={"x-request-id": "r"})).status == 200
        await eventually(lambda: "it answered 400" in outcome(s, "r"))


async def test_what_has_no_next_turn_is_reported_as_ignored() -> None:
    async with stand() as s:
        reply = await s.http.post("/v1/completions", json={"model": "m", "prompt": "a", "nvext": HINT})
        assert reply.headers["x-penstock-ignored-hints"] == "agent_hints.speculative_prefill"
        for more in ({"n": 2}, {"continue_final_message": True}):
            reply = await s.chat(nvext=HINT, **more)
            assert reply.headers["x-penstock-ignored-hints"] == "agent_hints.speculative_prefill"
        await s.chat(nvext={"agent_hints": {"speculative_prefill": False}})
        assert len(sent(s)) == 4 and not s.service.exchanges.warming.open


async def test_tool_calls_are_said_as_callers_send_them_back() -> None:
    async def call_tool(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await answer_well(request, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for function in ({"name": "find", "arguments": ""}, {"arguments": '{"a":'}, {"arguments": "1}"}):
            part = {"index": 0, "function": function} | ({"id": "c1"} if "name" in function else {})
            await response.write(chunk({"tool_calls": [part]}))
        await response.write(chunk({}, "tool_calls") + b"data: [DONE]\n\n")
        return response

    async with stand() as s:
        s.engines[0].reply = call_tool
        await (await s.chat(nvext=HINT, stream=True)).read()
        await eventually(lambda: len(sent(s)) == 2)
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a":1}'}}
        assert sent(s)[1]["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"choices":[]}', b'{"choices":[{"message":"x"}]}', b"x" * (2 << 20)]
)
def test_an_answer_that_says_nothing_has_no_message(body: bytes) -> None:
    spoken = SpokenMessage()
    spoken.take(body)
    assert spoken.message(streamed=False) is None and spoken.message(streamed=True) is None
