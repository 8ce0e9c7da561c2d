"""Refusals of requests longer than the context: as OpenAI refuses them, whoever found out, in whatever words."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from penstock.adapters.engines.dialects.dialect import overflows
from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings
from penstock.frontend.prompt.context_overflow import CODE, above_limit, in_openai_words, too_long
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from tests.frontend.stand import stand

REFUSALS: dict[str, tuple[int, dict[str, Any]]] = {
    "vllm": (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 32 tokens. However, your request has 90 input "
                "tokens. (parameter=input_tokens, value=90)",
                "type": "BadRequestError",
                "param": "input_tokens",
                "code": 400,
            }
        },
    ),
    "vllm, decoder": (
        400,
        {
            "object": "error",
            "message": "The decoder prompt (length 90) is longer than the maximum model length of 32. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    "sglang": (
        400,
        {
            "object": "error",
            "message": "The input (90 tokens) is longer than the model's context length (32 tokens).",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    "sglang, output": (
        400,
        {
            "object": "error",
            "message": "Requested token count exceeds the model's maximum context length of 32 tokens. You requested a "
            "total of 60 tokens: 20 tokens from the input messages and 40 tokens for the completion.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    "llama.cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size. try increasing the context size or enable "
                "context shift",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 90,
                "n_ctx": 32,
            }
        },
    ),
    "tensorrt-llm, by a status of its own": (
        500,
        {
            "object": "error",
            "message": "The sum of prompt length (90.0), query length (0) should not exceed max_num_tokens (32)",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        },
    ),
}


def litellm_falls_back(text: str) -> bool:
    """Whether LiteLLM 1.106 takes an error for a context overflow: those of its words that we use."""
    lower = text.lower()
    return "this model's maximum context length is" in lower or "input tokens exceed the configured limit" in lower


def langchain_falls_back(body: dict[str, Any]) -> bool:
    """Whether langchain-openai 1.7 does: it looks at the whole error as text."""
    return "context_length_exceeded" in str(body)


def is_overflow(status: int, body: dict[str, Any], param: str) -> bool:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["code"] == "context_length_exceeded"
    return status == 400 and litellm_falls_back(error["message"]) and langchain_falls_back(body)


def refusing(status: int, body: dict[str, Any]) -> Callable[[web.Request, dict[str, Any]], Awaitable[web.Response]]:
    async def reply(request: web.Request, asked: dict[str, Any]) -> web.Response:
        return web.json_response(body, status=status)

    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSALS)
async def test_an_engines_refusal_says_it_in_openais_words(name: str, stream: bool) -> None:
    async with stand(card={"max_model_len": 32}) as s:
        s.engines[0].reply = refusing(*REFUSALS[name])
        answer = await s.chat(stream=stream)
        body = await answer.json()
        assert is_overflow(answer.status, body, "messages")
        told = REFUSALS[name][1]
        assert (told.get("error") or told)["message"] in body["error"]["message"], "the engine's own words stay"
        status = s.service.cluster.status()
        assert status.workers[0].failures == 0 and len(s.engines[0].bodies) == 1, "and it is not to blame"
        assert s.records[-1].fault == "client" and s.records[-1].status == 400


async def test_other_refusals_pass_as_they_are() -> None:
    body = {"error": {"message": "top_p must be in (0, 1]", "type": "BadRequestError", "code": 400}}
    async with stand() as s:
        s.engines[0].reply = refusing(400, body)
        answer = await s.chat()
        assert answer.status == 400 and await answer.json() == body


async def test_what_we_find_out_ourselves_is_said_alike() -> None:
    asked = {"model": "m", "prompt": [1] * 11}
    async with stand(frontend=FrontendSettings(limits=LimitSettings(prompt_max=10))) as s:
        answer = await s.http.post("/v1/completions", json=asked)
        assert is_overflow(answer.status, await answer.json(), "prompt") and not s.engines[0].bodies
    async with stand(card={"max_model_len": 8}, tokenizer=load_tokenizer("builtin:sim")) as s:
        answer = await s.http.post("/v1/completions", json=asked)
        assert is_overflow(answer.status, await answer.json(), "prompt")
        answer = await s.chat("a prompt of more than eight tokens, which is soon reached")
        assert is_overflow(answer.status, await answer.json(), "messages") and not s.engines[0].bodies


async def test_a_prompt_too_long_for_the_worker_it_is_pinned_to() -> None:
    async with stand(2) as s:
        s.join(s.engines[0], max_model_len=8, epoch=2)
        pinned = {"x-penstock-worker": "e0"}
        answer = await s.http.post("/v1/completions", json={"model": "m", "prompt": [1] * 11}, headers=pinned)
        body = await answer.json()
        assert answer.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert litellm_falls_back(body["error"]["message"]) and "the prompt has 11" in body["error"]["message"]


def test_words() -> None:
    assert too_long(90, 32, "messages") == in_openai_words(too_long(90, 32, "messages"), 64)
    assert litellm_falls_back(above_limit(90, 32, "prompt")) and "90 tokens" in above_limit(90, 32, "prompt")
    assert in_openai_words("no", None) == f"This model's maximum context length is exceeded: no ({CODE})"
    assert not overflows("max_tokens must be at least 1") and not overflows("model m does not exist")
