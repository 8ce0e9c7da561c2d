"""Calls and reasoning parsed here: in streams, whole answers and broken ones, over the frontend on a socket."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from penstock.adapters.engines.http.event_stream import chunks_of
from penstock.frontend.exchange.prefix_warming import SpokenMessage
from tests.frontend.parsers.answers import WEATHER
from tests.frontend.stand import Reply, Stand, chunk, stand

CALL = '<think>hm</think>I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in WEATHER.items()]
CARD: dict[str, Any] = {"engine": "vllm", "labels": {"tool_parser": "hermes", "reasoning_parser": "think"}}
USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
TOKEN = 3
"""Characters of one token of the scripted engine."""


def writes(text: str, *, cut: int | None = None, finish: str = "stop") -> Reply:
    """Make an engine write a text, token by token; where ``cut``, its connection breaks after so many."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.endswith("/chat/completions")
        head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            return web.json_response({**head, "choices": [choice], "usage": USAGE})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(**fields: Any) -> None:
            await response.write(b"data: " + json.dumps({**head, **fields}).encode() + b"\n\n")

        pieces = [text[place : place + TOKEN] for place in range(0, len(text), TOKEN)]
        if not chat:
            pieces = pieces[len(body["prompt"]) - 7 :]  # the prompt has the tokens that were written before
        else:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await send(choices=[first], prompt_token_ids=list(range(7)))
        for number, piece in enumerate(pieces):
            if chat and number == cut:
                assert request.transport is not None
                request.transport.close()
                return response
            output = {"delta": {"content": piece}} if chat else {"text": piece}
            ends = finish if number == len(pieces) - 1 else None
            await send(choices=[{"index": 0, **output, "token_ids": [number], "finish_reason": ends}])
        if (body.get("stream_options") or {}).get("include_usage"):
            await send(choices=[], usage=USAGE)
        await response.write(b"data: [DONE]\n\n")
        return response

    return reply


async def asked(s: Stand, **more: Any) -> tuple[dict[str, Any], str | None, bytes]:
    """Ask for a chat; return its message, why it ended, and the body."""
    answer = await s.chat(**{"tools": TOOLS, **more})
    body = await answer.read()
    assert answer.status == 200, body
    if not more.get("stream"):
        (choice,) = json.loads(body)["choices"]
        return choice["message"], choice["finish_reason"], body
    spoken = SpokenMessage()
    spoken.take(body)
    choices = [choice for chunk in chunks_of(body) for choice in chunk.get("choices") or ()]
    reasoning = "".join(choice["delta"].get("reasoning_content") or "" for choice in choices)
    message = {**(spoken.message(streamed=True) or {}), "reasoning_content": reasoning}
    return message, next((c["finish_reason"] for c in reversed(choices) if c["finish_reason"]), None), body


def check_call(message: dict[str, Any], finish: str | None) -> None:
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'} and call["type"] == "function"
    assert call["id"].startswith("call_") and finish == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("I look.\n", "hm")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_parsed_and_its_engine_is_asked_for_raw_text(stream: bool) -> None:
    async with stand(card=CARD) as s:
        s.engines[0].reply = writes(CALL)
        message, finish, body = await asked(
            s, stream=stream, tool_choice="auto", stream_options={"include_usage": True}
        )
        check_call(message, finish)
        sent = json.loads(s.engines[0].bodies[0])
        assert sent["tool_choice"] == "none" and sent["tools"] == TOOLS and "skip_special_tokens" not in sent
        assert b'"completion_tokens"' in body and s.records[-1].osl == 9
        if stream:
            assert body.endswith(b"data: [DONE]\n\n") and b"token_ids" not in body


async def test_special_tokens_stay_in_the_text_where_a_format_needs_them() -> None:
    async with stand(card={**CARD, "labels": {"tool_parser": "mistral"}}) as s:
        s.engines[0].reply = writes('[TOOL_CALLS]get_weather{"city": "Paris"}')
        message, finish, _ = await asked(s, stream=True)
        assert len(message["tool_calls"][0]["id"]) == 9 and finish == "tool_calls"
        assert json.loads(s.engines[0].bodies[0])["skip_special_tokens"] is False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "none"}])
async def test_without_tools_the_text_stays_text(stream: bool, more: dict[str, Any]) -> None:
    async with stand(card={**CARD, "labels": {"tool_parser": "hermes"}}) as s:
        s.engines[0].reply = writes(CALL)
        message, finish, _ = await asked(s, stream=stream, **more)
        assert message["content"] == CALL and "tool_calls" not in message and finish == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_limit_cuts_is_text(stream: bool) -> None:
    async with stand(card=CARD) as s:
        s.engines[0].reply = writes(CALL[:-30], finish="length")
        message, finish, _ = await asked(s, stream=stream)
        assert message["content"] == CALL[17:-30] and "tool_calls" not in message and finish == "length"


@pytest.mark.parametrize("cut", [2, 9, 20, 30])
async def test_a_call_goes_on_at_another_engine(cut: int) -> None:
    async with stand(2, card={**CARD, "max_model_len": 4096}) as s:
        for engine in s.engines:
            engine.reply = writes(CALL, cut=cut)
        message, finish, body = await asked(s, stream=True, max_tokens=100)
        check_call(message, finish)
        assert len(s.records[-1].legs) == 2 and body.endswith(b"data: [DONE]\n\n")
        engine = next(e for e in s.engines if e.paths[-1] == "/v1/completions")
        assert json.loads(engine.bodies[-1])["prompt"] == [*range(7), *range(cut)]


async def test_a_broken_answer_ends_with_the_text_that_had_waited() -> None:
    async with stand(card={**CARD, "engine": "openai"}) as s:
        s.engines[0].reply = writes(CALL, cut=20)
        message, finish, body = await asked(s, stream=True)
        assert message["content"] == CALL[17 : 20 * TOKEN] and b'"error"' in body and finish is None


async def test_an_engine_with_parsers_of_its_own_is_left_alone() -> None:
    async with stand(card={"engine": "vllm"}) as s:
        s.engines[0].reply = writes(CALL)
        message, _, _ = await asked(s, tool_choice="auto")
        assert message["content"] == CALL and json.loads(s.engines[0].bodies[0])["tool_choice"] == "auto"


async def test_a_client_hears_something_while_a_call_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.exchange.client_answer.HEARTBEAT", 0.05)
    async with stand(card=CARD) as s:
        heard = asyncio.Event()

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"content": "I look."}) + chunk({"content": CALL.partition("I look.")[2][:40]}))
            while not heard.is_set():  # the call grows, and no token of it may go out
                await response.write(chunk({"content": " "}))
                await asyncio.sleep(0.01)
            await response.write(chunk({"content": CALL.partition("I look.")[2][40:]}, finish="stop"))
            await response.write(b"data: [DONE]\n\n")
            return response

        s.engines[0].reply = slow
        answer = await s.chat(tools=TOOLS, stream=True)
        body = b""
        while body.count(b": waiting\n\n") < 3:
            body += await answer.content.readany()
        assert b"tool_calls" not in body
        heard.set()
        assert b"get_weather" in await answer.read()


# --- gpt-oss, whose text is not parsed here ---------------------------------------------------------------------------

HARMONY = "<|channel|>analysis<|message|>They want a city.<|end|><|start|>assistant<|channel|>final<|message|>Paris."
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A city?"}]},
    "/v1/responses": {"input": "A city?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "A city?"}], "max_tokens": 100},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_the_analysis_of_gpt_oss_is_never_shown_as_an_answer(path: str, stream: bool) -> None:
    async with stand() as s:
        s.engines[0].reply = writes(HARMONY)
        answer = await s.http.post(path, json={"model": "m", "stream": stream, **ASKED[path]})
        body = await answer.text()
        assert answer.status == (500 if path == "/v1/messages" else 502) and "They want" not in body
        assert "--tool-call-parser openai --reasoning-parser openai_gptoss" in body and "--jinja" in body
        assert s.records[-1].outcome == "failed" and s.records[-1].fault == "engine"
        findings = (await (await s.http.get("/admin/status")).json())["findings"]
        assert any("openai_gptoss" in finding["text"] for finding in findings), findings


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_parses_gpt_oss_answers_for_one_that_does_not(stream: bool) -> None:
    async with stand(2) as s:
        s.engines[0].reply = writes(HARMONY)
        for number in range(8):
            answer = await s.chat(f"{number} is the question", stream=stream)
            assert answer.status == 200 and "They want" not in await answer.text()
        assert s.engines[0].bodies, "it was tried"
