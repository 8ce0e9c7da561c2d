"""Does Anthropic's own client get from /v1/messages what it gets from its vendor?"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim import sim_server
from tests.frontend.scripted_answers import CALLS, script
from tests.frontend.stand import Stand, stand
from tests.frontend.test_overflow_clients import client
from tests.media_files import png

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}
ASKED: Any = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "How is it?"}]}
MADE: list[Any] = []
"""The clients of a test."""


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """They are closed in the loop that they were used in."""
    yield
    while MADE:
        await MADE.pop().close()


def anthropic_client(s: Stand, **options: Any) -> Any:
    defaults = {"base_url": s.server.url, "api_key": "none", "max_retries": 0}
    MADE.append(client("anthropic").AsyncAnthropic(**{**defaults, **options}))
    return MADE[-1]


def strictly(message: Any) -> Any:
    """Check a value of the client against the client's own type, which it builds without checking."""
    type(message).model_validate(message.model_dump(mode="json", warnings="error"))
    return message


async def test_it_creates_a_message() -> None:
    async with stand() as s:
        s.engines[0].reply = script("It is raining.", thinking="hm, rain")
        got = strictly(
            await anthropic_client(s).messages.create(
                **ASKED,
                system="Be short.",
                stop_sequences=["END"],
                extra_body={"top_k": 5},
                metadata={"user_id": "u-1"},
            )
        )
        assert [block.type for block in got.content] == ["thinking", "text"] and got.stop_reason == "end_turn"
        assert got.content[1].text == "It is raining."
        usage = got.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 16, 9)
        sent = json.loads(s.engines[0].bodies[0])
        assert sent["messages"][0] == {"role": "system", "content": "Be short."}
        assert (sent["stop"], sent["top_k"], sent["user"], sent["max_tokens"]) == (["END"], 5, "u-1", 50)


async def test_its_stream_has_every_event_in_the_vendors_order() -> None:
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    check = TypeAdapter(RawMessageStreamEvent)
    async with stand() as s:
        s.engines[0].reply = script("It rains.", thinking="hm", calls=CALLS, finish="tool_calls")
        stream = await anthropic_client(s).messages.create(**ASKED, tools=[WEATHER], stream=True)
        events = [event async for event in stream]
        for event in events:
            if event.type != "ping":
                check.validate_json(event.model_dump_json())
        block = ["content_block_start", *["content_block_delta"] * 2, "content_block_stop"]
        kinds = [event.type for event in events if event.type != "ping"]
        assert kinds == ["message_start", *block * 4, "message_delta", "message_stop"]
        deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
        assert deltas == [*["thinking_delta"] * 2, *["text_delta"] * 2, *["input_json_delta"] * 4]
        assert events[-2].delta.stop_reason == "tool_use" and events[-2].usage.cache_read_input_tokens == 16


async def test_its_stream_helper_adds_up_to_the_whole() -> None:
    async with stand() as s:
        s.engines[0].reply = script("It rains.", thinking="hm", calls=CALLS, finish="tool_calls")
        anthropic = anthropic_client(s)
        async with anthropic.messages.stream(**ASKED, tools=[WEATHER]) as stream:
            got = strictly(await stream.get_final_message())
        whole = await anthropic.messages.create(**ASKED, tools=[WEATHER])
        dumped = [[block.model_dump(exclude_none=True) for block in m.content] for m in (got, whole)]
        assert [d.get("input") for d in dumped[1]] == [None, None, {"city": "Oslo"}, {"city": "Rome"}]
        for block in dumped[0]:
            block.pop("parsed_output", None)
        assert dumped[0] == dumped[1] and got.usage.output_tokens == whole.usage.output_tokens


async def test_tools_go_there_and_back() -> None:
    async with stand() as s:
        anthropic = anthropic_client(s)
        s.engines[0].reply = script("Let me look.", calls=CALLS, finish="tool_calls", thinking="hm")
        first = await anthropic.messages.create(**ASKED, tools=[WEATHER], tool_choice={"type": "any"})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
            for block in first.content
            if block.type == "tool_use"
        ]
        said = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        s.engines[0].reply = script("Rain in both.")
        await anthropic.messages.create(**{**ASKED, "messages": ASKED["messages"] + said}, tools=[WEATHER])
        asked, told = (json.loads(body) for body in s.engines[0].bodies)
        assert asked["tool_choice"] == "required" and asked["tools"][0]["function"]["parameters"] == SCHEMA
        _, spoken, *given = told["messages"]
        assert (spoken["content"], spoken["reasoning_content"]) == ("Let me look.", "hm")
        assert [json.loads(call["function"]["arguments"])["city"] for call in spoken["tool_calls"]] == ["Oslo", "Rome"]
        assert given == [{"role": "tool", "tool_call_id": c["id"], "content": "rain"} for c in CALLS]


async def test_structured_output_images_and_counts() -> None:
    engine = await sim_server.start(SimSettings(), model="m", kv_events=False)
    try:
        async with stand(0, tokenizer=load_tokenizer("builtin:sim")) as s:
            s.join(type("Joined", (), {"name": "sim", "url": engine.url}))  # type: ignore[arg-type]
            s.service.cluster._node.feeds = SimpleNamespace(images={})  # type: ignore[attr-defined]
            anthropic = anthropic_client(s)
            config = {"format": {"type": "json_schema", "schema": SCHEMA}}
            got = strictly(await anthropic.messages.create(**ASKED, output_config=config))
            assert isinstance(json.loads(got.content[0].text)["city"], str)
            choice = {"type": "tool", "name": "weather"}
            call = await anthropic.messages.create(**ASKED, tools=[WEATHER], tool_choice=choice)
            assert call.stop_reason == "tool_use" and call.content[0].name == "weather"
            asked = {name: ASKED[name] for name in ("model", "messages")}
            count = await anthropic.messages.count_tokens(**asked, system="Be short.")
            plain = await anthropic.messages.create(**ASKED, system="Be short.")
            usage = plain.usage
            assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(280, 280)).decode()}
            picture = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
            seen = await anthropic.messages.create(**{**ASKED, "messages": [{"role": "user", "content": picture}]})
            assert seen.usage.input_tokens > usage.input_tokens
    finally:
        await engine.stop()


async def test_it_learns_why_an_answer_stopped() -> None:
    async with stand() as s:
        anthropic = anthropic_client(s)
        for reply, reason, stop in (
            (script("x", finish="length"), "max_tokens", None),
            (script("x", stop="END"), "stop_sequence", "END"),
            (script("x", finish="content_filter"), "refusal", None),
        ):
            s.engines[0].reply = reply
            got = await anthropic.messages.create(**ASKED)
            assert (got.stop_reason, got.stop_sequence) == (reason, stop)


async def test_errors_are_its_typed_exceptions() -> None:
    anthropic = client("anthropic")
    settings = FrontendSettings(
        limits=LimitSettings(rate=0.001, burst=5), security=SecuritySettings(api_keys=("right",))
    )
    async with stand(frontend=settings) as s:
        with pytest.raises(anthropic.AuthenticationError):
            await anthropic_client(s, api_key="wrong").messages.create(**ASKED)
        own = anthropic_client(s, api_key="right")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await own.messages.create(**{**ASKED, "model": "unknown"})
        assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="input_schema"):
            await own.messages.create(**ASKED, tools=[{"name": "weather"}])
        s.engines[0].reply = script("half an answer", breaks=True)
        with pytest.raises(anthropic.APIError, match="go on elsewhere"):
            _ = [event async for event in await own.messages.create(**ASKED, stream=True)]
        await s.engines[0].stop()
        with pytest.raises(anthropic.InternalServerError):
            await own.messages.create(**ASKED)
        with pytest.raises(anthropic.InternalServerError):
            await own.messages.create(**ASKED)
        with pytest.raises(anthropic.RateLimitError):
            await own.messages.create(**ASKED)
    async with stand(0) as s:
        with pytest.raises(anthropic.InternalServerError) as overloaded:  # no worker
            await anthropic_client(s).messages.create(**ASKED)
        assert overloaded.value.status_code == 529
        assert overloaded.value.body["error"]["type"] == "overloaded_error"


async def test_it_retries_and_times_out() -> None:
    anthropic = client("anthropic")
    async with stand() as s:
        with pytest.raises(anthropic.APITimeoutError):
            s.engines[0].reply = lambda request, body: asyncio.sleep(30)  # type: ignore[assignment, return-value]
            await anthropic_client(s, timeout=0.3).messages.create(**ASKED)
        await asyncio.wait_for(s.engines[0].hung_up.wait(), 5)
        s.engines[0].reply = script("late")
        s.service.gate.draining = True
        retried = asyncio.create_task(anthropic_client(s, max_retries=3).messages.create(**ASKED))
        await asyncio.sleep(0.2)
        s.service.gate.draining = False
        assert (await retried).content[0].text == "late"
