"""Do LangChain, its NVIDIA package and LiteLLM get answers, also where they speak responses and messages to us?"""

import asyncio
import json
from typing import Any

import pytest

from tests.frontend.scripted_answers import CALLS, script
from tests.frontend.stand import stand
from tests.frontend.test_openai_client import SHAPE
from tests.frontend.test_overflow_clients import alone, client

pytestmark = pytest.mark.slow
__all__ = ["alone"]


async def test_langchain_speaks_responses() -> None:
    langchain = client("langchain_openai")
    async with stand() as s:
        s.engines[0].reply = script("It rains.", calls=CALLS, finish="tool_calls")
        chat = langchain.ChatOpenAI(
            model="m", base_url=f"{s.server.url}/v1", api_key="none", max_retries=0, use_responses_api=True
        )
        answer = await chat.ainvoke("How is it?")
        assert [call["args"]["city"] for call in answer.tool_calls] == ["Oslo", "Rome"]
        assert answer.usage_metadata["input_token_details"]["cache_read"] == 16
        pieces = [piece async for piece in chat.astream("How is it?")]
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        assert [call["args"]["city"] for call in whole.tool_calls] == ["Oslo", "Rome"]
        assert set(s.engines[0].paths) == {"/v1/chat/completions"}


async def test_litellm_speaks_messages() -> None:
    litellm = client("litellm")
    litellm.telemetry = False
    async with stand() as s:
        s.engines[0].reply = script("It rains.", calls=CALLS, finish="tool_calls")
        asked = {"model": "anthropic/m", "api_base": s.server.url, "api_key": "none", "max_tokens": 50}
        messages = [{"role": "user", "content": "How is it?"}]
        answer = await litellm.acompletion(messages=messages, **asked)
        (choice,) = answer.choices
        assert choice.message.content == "It rains." and choice.finish_reason == "tool_calls"
        assert [call.id for call in choice.message.tool_calls] == ["call_a", "call_b"]
        stream = await litellm.acompletion(messages=messages, stream=True, **asked)
        assert "".join([piece.choices[0].delta.content or "" async for piece in stream]) == "It rains."


async def test_langchains_nvidia_client_answers_streams_and_calls_tools() -> None:
    nvidia = client("langchain_nvidia_ai_endpoints")
    async with stand() as s:
        s.engines[0].reply = script("It rains.", calls=CALLS, finish="tool_calls")

        def made(model: str) -> Any:
            return nvidia.ChatNVIDIA(model=model, base_url=f"{s.server.url}/v1", api_key="none")

        chat = await asyncio.to_thread(made, "m")  # it asks for the models while it is made
        function = {"name": "weather", "description": "Tell the weather.", "parameters": {"type": "object"}}
        asking = chat.bind_tools([{"type": "function", "function": function}])
        answer = await asking.ainvoke("How is it?")
        assert answer.content == "It rains." and answer.usage_metadata["output_tokens"] == 9
        assert [call["args"]["city"] for call in answer.tool_calls] == ["Oslo", "Rome"]
        pieces = [piece async for piece in asking.astream("How is it?")]
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        assert whole.content == "It rains." and whole.usage_metadata["input_tokens"] == 20
        assert [call["args"]["city"] for call in whole.tool_calls] == ["Oslo", "Rome"]
        s.engines[0].reply = script('{"city": "Oslo"}')
        schema = {"title": "Place", **SHAPE}
        place = await asyncio.to_thread(lambda: chat.with_structured_output(schema).invoke("Where?"))
        assert place == {"city": "Oslo"}
        assert json.loads(s.engines[0].bodies[-1])["response_format"]["type"] == "json_schema"
        with pytest.raises(Exception, match="'x' does not exist"):
            await asyncio.to_thread(lambda: made("x").invoke("How is it?"))
