"""Do vendors' clients get from a real vLLM what their vendors give, and are its own tokens those we route by?

The shared server, with its render routes and parsers on, and a render process without a model's weights beside it.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock.adapters.engines.describe import describe
from penstock.adapters.engines.dialects.scale_out_routes import TOKEN_ROUTES
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.listen_address import free_port
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptHasher
from penstock.frontend.prompt.prompt_renderer import PromptRenderer, RenderedPrompt
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.frontend.prompt.request_body import Parsed, parse
from penstock.kernel.values import WorkerId
from penstock.router.events import WorkerJoined
from penstock_extras.open_inference.inference_listener import InferenceListener
from penstock_lab.traffic.prompt_maker import words
from tests.extras.test_open_inference import triton_inputs
from tests.frontend.stand import Stand, stand
from tests.frontend.test_overflow_clients import client
from tests.vllm.server import BLOCK, CPU_ENV, MODEL, PARSERS, VllmServer

SHAPE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Tell the weather.", "parameters": SHAPE}
SHORT = 12


class RenderProcess(VllmServer):
    """One ``vllm launch render``: template and tokenizer, no weights and no GPU."""

    def __init__(self, venv: Path, model: Path, port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [str(venv / "bin/vllm"), "launch", "render", str(model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", *PARSERS]
        path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **CPU_ENV, "PATH": path},
                start_new_session=True,
            )


@pytest.fixture(scope="module")
def servers(
    shared: VllmServer, venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, RenderProcess]]:
    render = RenderProcess(venv, checkpoint, free_port(), tmp_path_factory.mktemp("front-door") / "render.log")
    try:
        shared.wait_ready()
        render.wait_ready()
        yield shared, render
    finally:
        render.stop()


@asynccontextmanager
async def front(
    server: VllmServer,
    checkpoint: Path,
    render: str | None = None,
    routes: str | None = None,
    *,
    tokenizes: bool = True,
) -> AsyncIterator[Stand]:
    given = str(checkpoint) if tokenizes else None
    model = ModelSettings(tokenizer=given, render=render, pools={"main": PoolSettings()})
    tokenizer = None if given is None else load_tokenizer(given)
    async with stand(0, settings=ClusterSettings(models={MODEL: model}), tokenizer=tokenizer) as s:
        async with aiohttp.ClientSession() as http:
            labels = None if routes is None else {"labels": {TOKEN_ROUTES: routes}}
            card = await describe(http, server.url, worker=WorkerId("vllm-0"), epoch=1, model=MODEL, overrides=labels)
        s.live.post("router", WorkerJoined(card=card))
        yield s


def bodies() -> dict[str, tuple[Any, bytes]]:
    """Return requests whose tokens are compared: route and body."""
    system = {"role": "system", "content": "You are brief. Ünïcödé 漢字 😀"}
    turns = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "Three"}, {"type": "text", "text": " and four"}]}
    tool = {"type": "function", "function": TOOL}
    chats: dict[str, Any] = {
        "one turn": {"messages": turns[:1]},
        "turns and a system prompt": {"messages": [system, *turns, turns[0]]},
        "parts": {"messages": [*turns, parts]},
        "tools": {"messages": turns[:1], "tools": [tool]},
        "a prefilled answer": {"messages": turns, "add_generation_prompt": False, "continue_final_message": True},
        "long": {"messages": [{"role": "user", "content": words(500, seed=3)}]},
        "streamed": {"messages": turns[:1], "stream": True, "stream_options": {"include_usage": True}},
    }
    found: dict[str, tuple[Any, bytes]] = {
        name: ("chat_completions", msgspec.json.encode({"model": MODEL, **body})) for name, body in chats.items()
    }
    found["a text"] = ("completions", msgspec.json.encode({"model": MODEL, "prompt": "Once upon a time"}))
    return found


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "render process"])
async def test_its_own_tokens_are_those_of_our_template_and_tokenizer(
    servers: Any, checkpoint: Path, which: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = Http1Client()
    took: list[float] = []
    renderer = PromptRenderer(engines, took.append)
    hasher = PromptHasher(1, 10, lambda stage, seconds: None)
    tokenizer, hashing = load_tokenizer(str(checkpoint)), BlockHashing(BLOCK, 256)
    own: list[float] = []
    try:
        for name, (endpoint, raw) in bodies().items():
            for _ in range(5):
                parsed: Parsed = parse(endpoint, raw)
                theirs = await renderer.rendered(parsed, (servers[which].url,))
                assert isinstance(theirs, RenderedPrompt), (name, theirs, renderer.failures)
                started = time.perf_counter()
                ours = await hasher.prepare(parsed, tokenizer, hashing)
                own.append(time.perf_counter() - started)
            exact = await hasher.prepare(parsed, None, hashing, theirs.tokens)
            assert (exact.isl, exact.blocks) == (ours.isl, ours.blocks), name
    finally:
        hasher.close()
        await engines.close()
    render_ms, own_ms = (statistics.median(times) * 1e3 for times in (took, own))
    with capsys.disabled():
        print(f"\nrendered in {render_ms:.2f} ms, tokenised here in {own_ms:.2f} ms: {render_ms / own_ms:.0f} times")


async def test_requests_are_routed_by_the_tokens_that_vllm_counts(servers: Any, checkpoint: Path) -> None:
    server, render = servers
    for setting in ("engine", render.url, None):
        async with front(server, checkpoint, setting, tokenizes=setting is not None) as s:
            got = await (await s.chat(words(60, seed=4), model=MODEL, max_tokens=2)).json()
            assert s.records[-1].isl == got["usage"]["prompt_tokens"] and not s.service.renderer.notes()
            assert s.records[-1].way.startswith("rendered by")


ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Name a city."}]},
    "turns": {"messages": [{"role": "user", "content": words(40, seed=n)} for n in range(3)]},
    "logprobs": {"messages": [{"role": "user", "content": "Name a city."}], "logprobs": True, "top_logprobs": 3},
    "stop text": {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 40, "stop": ["e", "a"]},
    "special tokens": {"messages": [{"role": "user", "content": "Name a city."}], "skip_special_tokens": False},
    "shape": {
        "messages": [{"role": "user", "content": "Name a city."}],
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SHAPE}},
    },
    "text": {"prompt": "Once upon a time"},
    "text with logprobs": {"prompt": "Once upon a time", "logprobs": 2},
}
CALLING = {"type": "function", "function": TOOL}
PARSED = {"tools": {"messages": [{"role": "user", "content": "Weather?"}], "tools": [CALLING]}}


async def answered(s: Stand, body: dict[str, Any]) -> Any:
    """Return a whole answer, or a stream's chunks, without what differs from call to call."""
    route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    asked = {"model": MODEL, "max_tokens": SHORT, "temperature": 0, "seed": 1, **body}
    async with s.http.post(route, json=asked) as answer:
        text = await answer.text()
    assert answer.status == 200, text
    if body.get("stream"):
        return [json.loads(line[6:]) for line in text.splitlines() if line and not line.endswith("[DONE]")]
    return json.loads(text)


def counts(usage: Any) -> Any:
    """Return the counts of tokens. (``created_cache_tokens`` is null on the generate route where the chat's has 0.)"""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"], cached


def gist(answer: Any) -> Any:
    """Return what a client reads of an answer."""
    if isinstance(answer, list):
        choices = [choice for chunk in answer for choice in chunk["choices"]]
        text = "".join((each.get("delta") or {}).get("content") or each.get("text") or "" for each in choices)
        content = [entry for each in choices for entry in ((each.get("logprobs") or {}).get("content") or ())]
        probabilities = [(entry["token"], round(entry["logprob"], 3)) for entry in content]
        return (
            text,
            choices[-1]["finish_reason"],
            choices[-1].get("stop_reason"),
            probabilities,
            counts(answer[-1]["usage"]),
        )
    (choice,) = answer["choices"]
    message = choice.get("message") or {}
    flat = choice.get("logprobs") or {}
    probabilities = [(entry["token"], round(entry["logprob"], 3)) for entry in flat.get("content") or ()]
    probabilities += list(zip(flat.get("tokens") or (), flat.get("text_offset") or (), strict=False))
    said = choice.get("text"), message.get("content"), message.get("reasoning"), message.get("tool_calls")
    return said, choice["finish_reason"], choice.get("stop_reason"), probabilities, counts(answer["usage"])


async def test_answers_by_tokens_are_those_of_the_usual_route(servers: Any, checkpoint: Path) -> None:
    server, render = servers
    async with front(server, checkpoint, render.url) as s, front(server, checkpoint, "off") as usual:
        await answered(usual, ASKED["chat"])  # from now on the cache has the same for both
        for name, body in {**ASKED, **PARSED}.items():
            await answered(usual, body)
            by_tokens, expected = await answered(s, body), await answered(usual, body)
            assert gist(by_tokens) == gist(expected), name
            assert s.records[-1].way.startswith("rendered by"), (name, s.records[-1].way)
            assert s.records[-1].osl == usual.records[-1].osl, name
        for name, body in ASKED.items():
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            by_tokens, expected = await answered(s, streamed), await answered(usual, streamed)
            assert gist(by_tokens) == gist(expected), name
            carried = name != "text with logprobs"
            assert s.records[-1].way.startswith("rendered by") == carried, (name, s.records[-1].way)


async def test_what_the_way_by_tokens_costs(servers: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One token of output, so that what is measured is the way."""
    server, render = servers
    rounds = 30
    took: dict[str, list[float]] = {}
    async with (
        front(server, checkpoint, "off") as own,
        front(server, checkpoint, render.url, routes="none") as rendered,
        front(server, checkpoint, render.url) as tokens,
    ):
        ways = {"own tokens": own, "rendered": rendered, "by tokens": tokens}
        shapes = {"short": "Name a city.", "500 words": words(500, seed=7)}
        for number in range(rounds):
            for shape, text in shapes.items():
                for stream in (False, True):
                    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": stream}
                    body |= {"stream_options": {"include_usage": True}} if stream else {}
                    for way, s in ways.items():
                        started = time.perf_counter()
                        await answered(s, body)
                        if number:
                            name = f"{shape}, {'streamed' if stream else 'whole'}, {way}"
                            took.setdefault(name, []).append(time.perf_counter() - started)
        assert tokens.records[-1].way.startswith("rendered by") and "no generate route" in rendered.records[-1].way
    with capsys.disabled():
        print()
        for name, times in took.items():
            print(f"{name}: median {statistics.median(times) * 1e3:.1f} ms of {len(times)}")


async def test_openais_client(servers: Any, checkpoint: Path) -> None:
    openai = client("openai")
    async with (
        front(servers[0], checkpoint) as s,
        openai.AsyncOpenAI(base_url=f"{s.server.url}/v1", api_key="none", max_retries=0) as vendor,
    ):
        messages = [{"role": "user", "content": "Name a city."}]
        whole = await vendor.chat.completions.create(model=MODEL, messages=messages, max_tokens=SHORT, temperature=0)
        assert whole.usage.completion_tokens == SHORT and whole.choices[0].finish_reason == "length"
        stream = await vendor.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=SHORT,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == SHORT
        asked: dict[str, Any] = {"model": MODEL, "input": "Name a city.", "max_output_tokens": SHORT}
        response = await vendor.responses.create(**asked, temperature=0)
        assert response.output_text == whole.choices[0].message.content and response.status == "incomplete"
        assert response.usage.output_tokens == SHORT
        events = [event async for event in await vendor.responses.create(**asked, stream=True)]
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
        tool = {"type": "function", **TOOL}
        asked["max_output_tokens"] = 99
        choice = {"type": "function", "name": "weather"}
        called = await vendor.responses.create(**asked, tools=[tool], tool_choice=choice)
        (call,) = [item for item in called.output if item.type == "function_call"]
        json.loads(call.arguments)  # vLLM 0.32 holds them to JSON, and not to the tool's schema
        assert call.name == "weather"
        text_format = {"format": {"type": "json_schema", "name": "place", "schema": SHAPE, "strict": True}}
        shaped = await vendor.responses.create(**asked, text=text_format)
        assert set(json.loads(shaped.output_text)) == {"city"}
        with pytest.raises(openai.NotFoundError):
            await vendor.chat.completions.create(model="unknown", messages=messages)
        with pytest.raises(openai.BadRequestError) as refused:
            await vendor.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
        assert "temperature" in str(refused.value)
        with pytest.raises(openai.BadRequestError) as long:
            await vendor.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": words(3000, seed=1)}]
            )
        assert long.value.code == "context_length_exceeded"


async def test_anthropics_client(servers: Any, checkpoint: Path) -> None:
    anthropic = client("anthropic")
    async with (
        front(servers[0], checkpoint) as s,
        anthropic.AsyncAnthropic(base_url=s.server.url, api_key="none", max_retries=0) as vendor,
    ):
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": SHORT,
            "messages": [{"role": "user", "content": "Name a city."}],
        }
        whole = await vendor.messages.create(**asked, extra_body={"temperature": 0})
        assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == SHORT
        async with vendor.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content[0].text == whole.content[0].text and streamed.usage.output_tokens == SHORT
        counted = await vendor.messages.count_tokens(model=MODEL, messages=asked["messages"])
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        tool = {"name": "weather", "description": "Tell the weather.", "input_schema": SHAPE}
        called = await vendor.messages.create(
            **{**asked, "max_tokens": 99}, tools=[tool], tool_choice={"type": "tool", "name": "weather"}
        )
        assert called.stop_reason == "tool_use" and called.content[-1].name == "weather"
        shaped = await vendor.messages.create(
            **{**asked, "max_tokens": 99}, output_config={"format": {"type": "json_schema", "schema": SHAPE}}
        )
        assert set(json.loads(shaped.content[0].text)) == {"city"}
        with pytest.raises(anthropic.NotFoundError):
            await vendor.messages.create(**{**asked, "model": "unknown"})
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await vendor.messages.create(**{**asked, "messages": [{"role": "user", "content": words(3000, seed=1)}]})


async def test_langchains_clients(servers: Any, checkpoint: Path) -> None:
    openai, nvidia = client("langchain_openai"), client("langchain_nvidia_ai_endpoints")
    errors = client("openai")
    async with front(servers[0], checkpoint) as s:
        base: dict[str, Any] = {"model": MODEL, "base_url": f"{s.server.url}/v1", "api_key": "none"}
        sampled: dict[str, Any] = {"temperature": 0, "max_tokens": SHORT}
        chats = {
            "openai": openai.ChatOpenAI(**base, **sampled, max_retries=0, stream_usage=True),
            "responses": openai.ChatOpenAI(**base, **sampled, max_retries=0, use_responses_api=True),
            # It asks for the models while it is made.
            "nvidia": await asyncio.to_thread(lambda: nvidia.ChatNVIDIA(**base, **sampled)),
        }
        texts = set()
        for name, chat in chats.items():
            whole = await chat.ainvoke("Name a city.")
            assert whole.usage_metadata["output_tokens"] == SHORT, name
            pieces = [piece async for piece in chat.astream("Name a city.")]
            streamed = pieces[0]
            for piece in pieces[1:]:
                streamed += piece
            assert streamed.text == whole.text, name
            texts.add(whole.text)
        assert len(texts) == 1
        schema = {"title": "place", **SHAPE}
        for name, maker in (("openai", openai.ChatOpenAI), ("nvidia", nvidia.ChatNVIDIA)):
            longer = await asyncio.to_thread(lambda maker=maker: maker(**base, temperature=1, max_tokens=300))
            if name == "openai":  # its own helper leaves out maxLength, without which this model may go on
                shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SHAPE, "strict": True}}
                place = json.loads((await longer.bind(response_format=shape).ainvoke("Where?")).text)
            else:
                place = await asyncio.to_thread(
                    lambda made=longer: made.with_structured_output(schema).invoke("Where?")
                )
            assert set(place) == {"city"}, name
            # A forced call of vLLM 0.32 is any JSON, here a number, which LangChain can't read: so none is forced.
            tools = longer.bind_tools([{"type": "function", "function": TOOL}])
            assert (await tools.ainvoke("How is it?")).text, name
        with pytest.raises(errors.NotFoundError):
            await openai.ChatOpenAI(**{**base, "model": "unknown"}, max_retries=0).ainvoke("x")
        with pytest.raises(errors.BadRequestError, match="maximum context length"):
            await chats["openai"].ainvoke(words(3000, seed=1))


async def test_litellm(servers: Any, checkpoint: Path) -> None:
    litellm = client("litellm")
    litellm.telemetry = False
    async with front(servers[0], checkpoint) as s:
        messages = [{"role": "user", "content": "Name a city."}]
        texts = set()
        for provider, base in (("openai", f"{s.server.url}/v1"), ("anthropic", s.server.url)):
            asked: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none"}
            asked |= {"messages": messages, "num_retries": 0}
            sampled = {"temperature": 0, "max_tokens": SHORT}
            whole = await litellm.acompletion(**asked, **sampled)
            assert whole.usage.completion_tokens == SHORT and whole.choices[0].finish_reason == "length", provider
            stream = await litellm.acompletion(**asked, **sampled, stream=True)
            text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
            assert text == whole.choices[0].message.content, provider
            texts.add(text)
            choice = {"type": "function", "function": {"name": "weather"}}
            tools = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": choice}
            called = await litellm.acompletion(**asked, temperature=0, max_tokens=99, **tools)
            assert called.choices[0].message.tool_calls[0].function.name == "weather", provider
            with pytest.raises(litellm.ContextWindowExceededError):
                await litellm.acompletion(**{**asked, "messages": [{"role": "user", "content": words(3000, seed=1)}]})
            with pytest.raises(litellm.NotFoundError):
                await litellm.acompletion(**{**asked, "model": f"{provider}/unknown"})
        assert len(texts) == 1


async def test_clients_time_out_and_retry_while_vllm_answers_nothing(servers: Any, checkpoint: Path) -> None:
    openai, anthropic = client("openai"), client("anthropic")
    messages = [{"role": "user", "content": "Name a city."}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": SHORT, "temperature": 0}
    question: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": SHORT}
    async with (
        front(servers[0], checkpoint) as s,
        openai.AsyncOpenAI(base_url=f"{s.server.url}/v1", api_key="none") as one,
        anthropic.AsyncAnthropic(base_url=s.server.url, api_key="none") as other,
    ):
        before = await one.chat.completions.create(**asked)
        os.kill(servers[0].process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(openai.APITimeoutError):
                await one.with_options(timeout=0.5, max_retries=0).chat.completions.create(**asked)
            with pytest.raises(anthropic.APITimeoutError):
                await other.with_options(timeout=0.5, max_retries=0).messages.create(**question)
            late = asyncio.create_task(one.with_options(timeout=3, max_retries=5).chat.completions.create(**asked))
            later = asyncio.create_task(other.with_options(timeout=3, max_retries=5).messages.create(**question))
            await asyncio.sleep(4)  # each has given up once
            assert not late.done() and not later.done()
        finally:
            os.kill(servers[0].process.pid, signal.SIGCONT)
        assert (await late).choices[0].message.content == before.choices[0].message.content
        assert (await later).usage.output_tokens == SHORT
        assert not s.router.requests, "what clients gave up is over"


async def test_tritons_client(servers: Any, checkpoint: Path) -> None:
    triton = client("tritonclient.grpc.aio")
    settings: dict[str, Any] = {"max_tokens": SHORT, "temperature": 0.0}
    async with front(servers[0], checkpoint) as s:
        listener = InferenceListener(s.service)
        await listener.start(0)
        async with triton.InferenceServerClient(listener.address) as vendor:
            assert await vendor.is_model_ready(MODEL)
            text = b"Once upon a time"
            whole = await vendor.infer(MODEL, triton_inputs(triton, text, streaming=False), parameters=settings)
            (answer,) = whole.as_numpy("text_output").tolist()

            async def requests() -> AsyncIterator[dict[str, Any]]:
                inputs = triton_inputs(triton, text, streaming=True)
                yield {"model_name": MODEL, "inputs": inputs, "request_id": "1", "parameters": settings}

            pieces = []
            async for got, error in vendor.stream_infer(requests()):
                assert error is None
                pieces += [] if got.as_numpy("text_output") is None else got.as_numpy("text_output").tolist()
            assert answer and len(pieces) > 1 and b"".join(pieces) == answer
        await listener.close()
