"""Does OpenAI's own client get from /v1/responses what it gets from its vendor?"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim import sim_server
from tests.frontend.scripted_answers import CALLS, script
from tests.frontend.stand import Stand, answer, eventually, stand
from tests.frontend.test_overflow_clients import client

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
SHAPE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


MADE: list[Any] = []
"""The clients of a test."""


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """They are closed in the loop that they were used in."""
    yield
    while MADE:
        await MADE.pop().close()


def openai_client(s: Stand, **options: Any) -> Any:
    defaults = {"base_url": f"{s.server.url}/v1", "api_key": "none", "max_retries": 0}
    MADE.append(client("openai").AsyncOpenAI(**{**defaults, **options}))
    return MADE[-1]


def strictly(response: Any) -> Any:
    """Check a value of the client against the client's own type, which it builds without checking."""
    type(response).model_validate(response.model_dump(mode="json", by_alias=True, warnings="error"), strict=False)
    return response


async def streamed(call: Any) -> list[Any]:
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    check = TypeAdapter(ResponseStreamEvent)
    events = [event async for event in await call]
    for event in events:
        check.validate_json(event.model_dump_json(by_alias=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_it_creates_a_response() -> None:
    async with stand() as s:
        s.engines[0].reply = script("It is raining.", thinking="hm, rain")
        got = strictly(await openai_client(s).responses.create(model="m", input="How is it?", instructions="Be short."))
        assert got.output_text == "It is raining." and got.status == "completed"
        assert [item.type for item in got.output] == ["reasoning", "message"]
        usage = got.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (20, 16)
        assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (9, 4)
        sent = json.loads(s.engines[0].bodies[0])
        assert [(m["role"], m["content"]) for m in sent["messages"]] == [
            ("system", "Be short."),
            ("user", "How is it?"),
        ]


async def test_its_stream_has_every_event_in_the_vendors_order() -> None:
    async with stand() as s:
        s.engines[0].reply = script("It rains.", thinking="hm", calls=CALLS, finish="tool_calls")
        events = await streamed(openai_client(s).responses.create(model="m", input="?", tools=[WEATHER], stream=True))
        item = ["output_item.added", "content_part.added"]
        call = ["output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
        assert [event.type.removeprefix("response.") for event in events] == [
            *("created", "in_progress"),
            *(*item, *["reasoning_text.delta"] * 2, "reasoning_text.done", "content_part.done", "output_item.done"),
            *(*item, *["output_text.delta"] * 2, "output_text.done", "content_part.done", "output_item.done"),
            *(*call, "output_item.done", *call, "output_item.done"),
            "completed",
        ]
        last = events[-1].response
        assert [(c.call_id, c.arguments) for c in last.output[2:]] == [
            (c["id"], c["function"]["arguments"]) for c in CALLS
        ]
        assert [event.item for event in events if event.type == "response.output_item.done"] == last.output


async def test_its_stream_helper_adds_up_to_the_whole() -> None:
    async with stand() as s:
        s.engines[0].reply = script("It rains.", thinking="hm", calls=CALLS[:1], finish="tool_calls")
        async with openai_client(s).responses.stream(model="m", input="?", tools=[WEATHER]) as stream:
            got = await stream.get_final_response()
        assert got.output_text == "It rains." and got.output[2].parsed_arguments == {"city": "Oslo"}


async def test_tools_go_there_and_back() -> None:
    async with stand() as s:
        openai = openai_client(s)
        s.engines[0].reply = script(calls=CALLS, finish="tool_calls")
        first = strictly(await openai.responses.create(model="m", input="Oslo, Rome?", tools=[WEATHER]))
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in first.output]
        s.engines[0].reply = script("Rain in both.")
        await openai.responses.create(model="m", input=results, previous_response_id=first.id, tools=[WEATHER])
        whole = [{"role": "user", "content": "Oslo, Rome?"}, *(i.model_dump(exclude_none=True) for i in first.output)]
        await openai.responses.create(model="m", input=[*whole, *results], tools=[WEATHER])
        asked, by_id, by_items = (json.loads(body) for body in s.engines[0].bodies)
        assert asked["tools"][0]["function"]["name"] == "weather"
        assert [m["role"] for m in by_id["messages"]] == ["user", "assistant", "tool", "tool"]
        assert by_id["messages"][1]["tool_calls"] == CALLS
        assert by_id["messages"] == by_items["messages"], "a conversation by its id is the conversation by its items"


async def test_custom_tools_and_namespaces_have_its_types() -> None:
    tools = [
        {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [WEATHER]},
        {"type": "custom", "name": "note", "description": "Writes a note."},
        {"type": "web_search"},
    ]
    calls = [
        {"id": "call_a", "type": "function", "function": {"name": "sky__weather", "arguments": '{"city": "Oslo"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "note", "arguments": '{"input": "rain"}'}},
    ]
    async with stand() as s:
        s.engines[0].reply = script(calls=calls, finish="tool_calls")
        openai = openai_client(s)
        whole = strictly(await openai.responses.create(model="m", input="?", tools=tools))
        events = await streamed(openai.responses.create(model="m", input="?", tools=tools, stream=True))
        for weather, note in (whole.output, events[-1].response.output):
            assert (weather.type, weather.namespace, weather.name) == ("function_call", "sky", "weather")
            assert (note.type, note.name, note.input) == ("custom_tool_call", "note", "rain")
        assert whole.metadata == {"penstock_left_out": "tools.web_search"}


async def test_structured_output_is_parsed() -> None:
    engine = await sim_server.start(SimSettings(), model="m", kv_events=False)
    try:
        async with stand(0) as s:
            s.join(type("Joined", (), {"name": "sim", "url": engine.url}))  # type: ignore[arg-type]
            text = {"format": {"type": "json_schema", "name": "place", "schema": SHAPE, "strict": True}}
            got = strictly(await openai_client(s).responses.create(model="m", input="where?", text=text))
            assert isinstance(json.loads(got.output_text)["city"], str)
            choice = {"type": "function", "name": "weather"}
            call = await openai_client(s).responses.create(
                model="m", input="where?", tools=[WEATHER], tool_choice=choice, stream=True
            )
            assert [e async for e in call][-1].response.output[0].type == "function_call"
    finally:
        await engine.stop()


async def test_a_conversation_goes_on_and_has_one_session() -> None:
    async with stand() as s:
        openai = openai_client(s)
        first = await openai.responses.create(model="m", input="one")
        second = await openai.responses.create(model="m", input="two", previous_response_id=first.id)
        third = await openai.responses.create(model="m", input="three", previous_response_id=second.id, store=False)
        last = json.loads(s.engines[0].bodies[-1])["messages"]
        assert [m["content"] for m in last] == ["one", "xxxxx", "two", "xxxxx", "three"]
        assert [record.session for record in s.records] == [first.id] * 3
        assert (await openai.responses.retrieve(second.id)).previous_response_id == first.id
        with pytest.raises(client("openai").NotFoundError):
            await openai.responses.retrieve(third.id)
        await openai.responses.delete(first.id)
        with pytest.raises(client("openai").BadRequestError) as refused:
            await openai.responses.create(model="m", input="x", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"


async def test_it_lists_the_items_of_a_conversation_and_counts_their_tokens() -> None:
    from openai.types.responses import ResponseItem
    from pydantic import TypeAdapter

    check = TypeAdapter(ResponseItem)
    async with stand() as s:
        openai = openai_client(s)
        s.engines[0].reply = script(calls=CALLS, finish="tool_calls")
        asked = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "Where?"}]
        first = await openai.responses.create(model="m", input=asked, tools=[WEATHER])
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in first.output]
        s.engines[0].reply = script("Rain.")
        second = await openai.responses.create(model="m", input=results, previous_response_id=first.id, tools=[WEATHER])
        items = [item async for item in openai.responses.input_items.list(second.id, order="asc", limit=2)]
        for item in items:
            check.validate_json(item.model_dump_json())
        kinds = ["message", "message", *["function_call"] * 2, *["function_call_output"] * 2]
        assert [item.type for item in items] == kinds and len({item.id for item in items}) == 6
        assert items[0].content[0].text == "Look." and items[1].content[0].type == "output_text"
        newest = await openai.responses.input_items.list(second.id, limit=1)
        assert newest.data == items[-1:] and newest.has_more
        whole = await openai.responses.create(model="m", input="alone")
        assert [i.content[0].text async for i in openai.responses.input_items.list(whole.id)] == ["alone"]
        count = await openai.responses.input_tokens.count(model="m", input="word " * 100)
        assert count.object == "response.input_tokens" and 80 < count.input_tokens < 200
        longer = await openai.responses.input_tokens.count(model="m", input="x", previous_response_id=second.id)
        assert longer.input_tokens > (await openai.responses.input_tokens.count(model="m", input="x")).input_tokens


async def test_a_stored_response_is_retrieved_as_its_stream() -> None:
    tools = [WEATHER, {"type": "custom", "name": "note"}, {"type": "web_search"}]
    calls = [CALLS[0], {"id": "b", "type": "function", "function": {"name": "note", "arguments": '{"input": "rain"}'}}]
    async with stand() as s:
        openai = openai_client(s)
        for finish in ("tool_calls", "length"):
            s.engines[0].reply = script("It rains.", thinking="hm", calls=calls, finish=finish)
            made = await streamed(openai.responses.create(model="m", input="?", tools=tools, stream=True))
            again = await streamed(openai.responses.retrieve(made[-1].response.id, stream=True))
            first, second = (
                [event.model_dump(exclude={"sequence_number"}) for event in events if ".delta" not in event.type]
                for events in (made, again)
            )
            assert first == second
            rest = await openai.responses.retrieve(made[-1].response.id, stream=True, starting_after=len(again) - 3)
            assert [event.sequence_number async for event in rest] == [len(again) - 2, len(again) - 1]
        s.engines[0].reply = lambda request, body: answer(request, body, 5, gap=0.02)
        running = await openai.responses.create(model="m", input="x", background=True)
        events = await streamed(openai.responses.retrieve(running.id, stream=True))
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "t0 t1 t2 t3 t4 "
        await s.engines[0].stop()
        hopeless = await openai.responses.create(model="m", input="x", background=True)
        events = await streamed(openai.responses.retrieve(hopeless.id, stream=True))
        assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
        assert [i.content[0].text async for i in openai.responses.input_items.list(hopeless.id)] == ["x"]


async def test_a_background_response_is_retrieved_and_cancelled() -> None:
    async with stand() as s:
        openai = openai_client(s)
        s.engines[0].reply = lambda request, body: answer(request, body, 5, gap=0.02)
        started = strictly(await openai.responses.create(model="m", input="x", background=True))
        assert started.status == "queued"
        while (got := strictly(await openai.responses.retrieve(started.id))).status == "in_progress":
            await asyncio.sleep(0.02)
        assert got.status == "completed" and got.output_text == "t0 t1 t2 t3 t4 "
        s.engines[0].reply = lambda request, body: answer(request, body, 5000, gap=0.02)
        endless = await openai.responses.create(model="m", input="x", background=True)
        await eventually(lambda: len(s.engines[0].bodies) == 2)
        assert (await openai.responses.cancel(endless.id)).status == "cancelled"
        await asyncio.wait_for(s.engines[0].hung_up.wait(), 5)
        assert (await openai.responses.retrieve(endless.id)).status == "cancelled"
        with pytest.raises(client("openai").BadRequestError):
            await openai.responses.create(model="m", input="x", background=True, stream=True)
        await s.engines[0].stop()
        hopeless = await openai.responses.create(model="m", input="x", background=True)
        while (got := strictly(await openai.responses.retrieve(hopeless.id))).status == "in_progress":
            await asyncio.sleep(0.02)
        assert got.status == "failed" and got.error.code == "server_error"


async def test_errors_are_its_typed_exceptions() -> None:
    openai = client("openai")
    limits = LimitSettings(rate=0.001, burst=6)
    settings = FrontendSettings(limits=limits, security=SecuritySettings(api_keys=("right",)))
    async with stand(frontend=settings) as s:
        with pytest.raises(openai.AuthenticationError):
            await openai_client(s, api_key="wrong").responses.create(model="m", input="x")
        own = openai_client(s, api_key="right")
        with pytest.raises(openai.NotFoundError):
            await own.responses.create(model="unknown", input="x")
        with pytest.raises(openai.BadRequestError) as refused:
            search = {"type": "web_search"}
            await own.responses.create(model="m", input="x", tools=[search], tool_choice=search)
        assert refused.value.param == "tool_choice.type"
        s.engines[0].reply = script("half an answer", breaks=True)
        events = await streamed(own.responses.create(model="m", input="x", stream=True))
        assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
        await s.engines[0].stop()
        with pytest.raises(openai.InternalServerError):
            await own.responses.create(model="m", input="x")
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await own.responses.create(model="m", input="x")
        with pytest.raises(openai.RateLimitError):
            await own.responses.create(model="m", input="x")


async def test_it_retries_and_times_out() -> None:
    openai = client("openai")
    async with stand(0) as s:
        with pytest.raises(openai.InternalServerError):  # no worker: 503, with the seconds to wait
            await openai_client(s).responses.create(model="m", input="x")
    async with stand() as s:
        s.engines[0].reply = lambda request, body: asyncio.sleep(30)  # type: ignore[assignment, return-value]
        with pytest.raises(openai.APITimeoutError):
            await openai_client(s, timeout=0.3).responses.create(model="m", input="x")
        await asyncio.wait_for(s.engines[0].hung_up.wait(), 5)
        s.engines[0].reply = script("late")
        s.service.gate.draining = True
        retried = asyncio.create_task(openai_client(s, max_retries=3).responses.create(model="m", input="x"))
        await asyncio.sleep(0.2)
        s.service.gate.draining = False
        assert (await retried).output_text == "late"
