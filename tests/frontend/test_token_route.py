"""Is an answer by rendered tokens, an engine's generate route and derendered words that of the usual route?"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.adapters.engines.describe import describe
from penstock.adapters.engines.dialects.scale_out_routes import TOKEN_ROUTES, token_routes
from penstock.adapters.engines.http.engine_call import EngineCall
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.frontend.prompt import prompt_renderer
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.kernel.values import WorkerId
from penstock.router.events import WorkerJoined
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.sim.sim_server import RunningServer, start
from tests.frontend.stand import Engine, Stand, eventually, stand

GENERATE = "/inference/v1/generate"
HELLO = [{"role": "user", "content": "Tell me of water and of light."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


OPTIONS = SimSettings(kv_blocks=512, timing=TimingSettings(speed_up=50.0))

SLOW = SimSettings(kv_blocks=512)
"""Tokens come one by one."""


class CountedCalls(Http1Client):
    """Remembers each path that was asked for."""

    def __init__(self) -> None:
        super().__init__(connect_timeout=5.0)
        self.paths: list[str] = []

    def call(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> EngineCall:
        self.paths.append(path)
        return super().call(url, path, body, headers)

    def taken(self) -> list[str]:
        paths, self.paths = self.paths, []
        return paths


class Door:
    """A frontend with one engine, and a render server beside it."""

    def __init__(self, s: Stand, calls: CountedCalls, engine: RunningServer, render: RunningServer) -> None:
        self.s, self.calls, self.engine, self.render = s, calls, engine, render

    async def answer(self, body: dict[str, Any]) -> Any:
        """Return an answer: its JSON, or the chunks of its stream."""
        route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        before = len(self.s.records)
        async with self.s.http.post(route, json={"model": "sim", **body}) as answer:
            text = await answer.text()
        if answer.status == 200:
            await eventually(lambda: len(self.s.records) > before)
        if not body.get("stream") or answer.status != 200:
            return json.loads(text)
        *chunks, end = [line[6:] for line in text.splitlines() if line]
        assert end == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    async def join(self, engine: RunningServer, name: str, labels: dict[str, str] | None = None) -> None:
        async with aiohttp.ClientSession() as http:
            overrides = None if labels is None else {"labels": labels}
            card = await describe(http, engine.url, worker=WorkerId(name), epoch=1, overrides=overrides)
        self.s.live.post("router", WorkerJoined(card=card))

    @property
    def way(self) -> str:
        return str(self.s.records[-1].way)


@asynccontextmanager
async def door(
    render: str | None = "",
    *,
    tokenizer: bool = True,
    routes: bool = True,
    labels: dict[str, str] | None = None,
    aliases: tuple[str, ...] = (),
    options: SimSettings = OPTIONS,
) -> AsyncIterator[Door]:
    """Serve.

    Args:
        render: the setting; empty: the render server's URL.
        tokenizer: whether the frontend has the model's.
        routes: whether the engine has the token routes.
        labels: of the engine, beside or in the place of what it was asked.
    """
    engine = await start(options, scale_out=routes)
    beside = await start(OPTIONS, scale_out=True)
    calls = CountedCalls()
    model = ModelSettings(
        tokenizer="builtin:sim" if tokenizer else None,
        render=beside.url if render == "" else render,
        aliases=aliases,
        pools={"main": PoolSettings()},
    )
    given = load_tokenizer("builtin:sim") if tokenizer else None
    try:
        async with stand(0, settings=ClusterSettings(models={"sim": model}), tokenizer=given, calls=calls) as s:
            found = Door(s, calls, engine, beside)
            await found.join(engine, "e0", labels)
            yield found
    finally:
        await engine.stop()
        await beside.stop()


def shown(value: Any) -> Any:
    """Return an answer without its id and its time, and without lists of no calls, which vLLM leaves out."""
    for choice in value["choices"]:
        if not choice.get("message", {}).get("tool_calls", True):
            del choice["message"]["tool_calls"]
    return {name: each for name, each in value.items() if name not in ("id", "created")}


def joined(chunks: list[Any]) -> tuple[str, str | None, Any, int]:
    """Return a stream's text, finish reason, usage and how many log-probabilities it has."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join((each.get("delta") or {}).get("content") or each.get("text") or "" for each in choices)
    counted = sum(len(each["logprobs"]["content"]) for each in choices if each.get("logprobs"))
    return text, choices[-1]["finish_reason"], chunks[-1].get("usage"), counted


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"messages": HELLO, "max_tokens": 20}, "tokens"),
    "chat with log-probabilities": (
        {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 2},
        "tokens",
    ),
    "chat with a stop text": ({"messages": HELLO, "max_tokens": 60, "stop": ["."]}, "text"),
    "shaped chat": ({"messages": HELLO, "response_format": {"type": "json_object"}}, "tokens"),
    "chat with tools": ({"messages": HELLO, "max_tokens": 8, "tools": [TOOL]}, "tokens"),
    "text": ({"prompt": "Once upon a time", "max_tokens": 20}, "tokens"),
    "text with log-probabilities": ({"prompt": "Once", "max_tokens": 8, "logprobs": 2}, "tokens"),
    "text with a stop text": ({"prompt": "Once", "max_tokens": 60, "stop": ["."]}, "text"),
}
STREAMED: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO, "max_tokens": 20},
    "chat with log-probabilities": {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 2},
    "chat with a stop text": {"messages": HELLO, "max_tokens": 60, "stop": ["."]},
    "text": {"prompt": "Once upon a time", "max_tokens": 20},
}


@pytest.mark.parametrize("name", WHOLE)
async def test_a_whole_answer_is_that_of_the_usual_route(name: str) -> None:
    body, mode = WHOLE[name]
    async with door() as d, door("off") as usual:
        answer = await d.answer(body)
        derenders = ["derender"] if mode == "tokens" else []
        paths = [path.rpartition("/")[2] for path in d.calls.taken()]
        assert paths == ["render", "derender", "generate", *derenders], (
            "the second call asks whether there is the route"
        )
        expected = await usual.answer(body)
        assert shown(answer) == shown(expected)
        assert usual.calls.taken() in (["/v1/chat/completions"], ["/v1/completions"]) and not usual.way
        record = d.s.records[-1]
        assert (record.isl, record.osl) == (expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"])
        where = "by the engine itself" if mode == "text" else f"by {d.render.url}"
        assert d.way == f"rendered by {d.render.url}, generated of tokens, put into words {where}"
        await d.answer(body)
        assert [path.rpartition("/")[2] for path in d.calls.taken()] == ["render", "generate", *derenders]


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_is_that_of_the_usual_route(name: str, usage: bool) -> None:
    body = {**STREAMED[name], "stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
    async with door() as d, door("off") as usual:
        chunks, expected = await d.answer(body), await usual.answer(body)
        assert joined(chunks) == joined(expected) and joined(chunks)[0]
        if "messages" in body:
            assert shown(chunks[0]) == shown(expected[0])  # a text's first chunk has as many tokens as were there
        assert {chunk["object"] for chunk in chunks} == {chunk["object"] for chunk in expected}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert GENERATE in d.calls.taken() and "put into words by the engine itself" in d.way
        assert d.s.records[-1].osl == usual.s.records[-1].osl
        assert not any("token_ids" in choice for chunk in chunks for choice in chunk["choices"]), (
            "nobody asked for them"
        )


async def test_token_ids_that_are_asked_for_are_given() -> None:
    body = {"messages": HELLO, "max_tokens": 9, "return_token_ids": True, "stream": True}
    async with door() as d, door("off") as usual:
        chunks, expected = await d.answer(body), await usual.answer(body)
        ids, wanted = (
            [token for chunk in each for choice in chunk["choices"] for token in choice.get("token_ids", ())]
            for each in (chunks, expected)
        )
        assert ids == wanted and len(ids) == 9
        assert chunks[0]["prompt_token_ids"] == expected[0]["prompt_token_ids"]


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "several answers": ({"messages": HELLO, "n": 2, "max_tokens": 4}, "several answers"),
    "its prompt": ({"prompt": "Once", "echo": True, "max_tokens": 4}, "more than its output"),
    "streamed calls": ({"messages": HELLO, "tools": [TOOL], "stream": True, "max_tokens": 4}, "a stream's calls"),
    "a forced call": ({"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}, "forces a tool's call"),
    "log-probabilities": ({"prompt": "Once", "logprobs": 1, "stream": True, "max_tokens": 4}, "log-probabilities of"),
    "tokens": ({"prompt": [5, 6, 7], "max_tokens": 4}, "given as tokens"),
    "several prompts": ({"prompt": ["Once", "Twice"], "max_tokens": 4}, "given as tokens or as several"),
}


@pytest.mark.parametrize("name", UNFIT)
async def test_what_the_routes_cannot_carry_takes_the_usual_one_and_says_why(name: str) -> None:
    body, why = UNFIT[name]
    async with door() as d, door("off") as usual:
        answer, expected = await d.answer(body), await usual.answer(body)
        assert GENERATE not in d.calls.taken() and why in d.way
        if not body.get("stream"):
            for each in (answer, expected):
                for choice in each["choices"]:
                    for call in (choice.get("message") or {}).get("tool_calls") or ():
                        del call["id"]
            assert shown(answer) == shown(expected)
        explained = await (await d.s.http.get(f"/admin/explain/{d.s.records[-1].id}")).json()
        assert explained["request"]["way"] == d.way


async def test_another_engine_goes_on_with_a_stream_that_breaks_off() -> None:
    body = {"messages": [{"role": "user", "content": "water " * 200}], "max_tokens": 24, "stream": True}
    async with door(options=SLOW) as d, door("off") as usual:
        expected = joined(await usual.answer(body))
        assert joined(await d.answer(body)) == expected  # from now on the first engine has its blocks
        other = await start(SLOW, scale_out=True)
        try:
            await d.join(other, "e1")
            d.engine.server.faults.switch({"kind": "die_mid_stream", "tokens": 5})
            chunks = await d.answer(body)
            record = d.s.records[-1]
            assert joined(chunks) == expected and len({chunk["id"] for chunk in chunks}) == 1
            assert [leg.worker.partition("/")[0] for leg in record.legs] == ["e0", "e1"] and record.osl == 24
            assert d.calls.taken()[-2:] == [GENERATE, "/v1/completions"], "the rest is asked for as a text of tokens"
        finally:
            await other.stop()


async def test_a_name_that_stands_for_the_model_is_the_one_of_the_answer() -> None:
    async with door(aliases=("gpt",)) as d:
        for body in ({"messages": HELLO}, {"messages": HELLO, "stream": True}, {"prompt": "Once"}):
            answer = await d.answer({**body, "model": "gpt", "max_tokens": 6})
            models = {part["model"] for part in (answer if isinstance(answer, list) else [answer])}
            assert models == {"gpt"} and d.way.startswith("rendered by")


async def test_own_parsers_read_the_calls_of_a_stream_of_tokens() -> None:
    async with door(labels={"tool_parser": "hermes"}) as d:
        assert TOKEN_ROUTES in d.s.service.cluster.cards()[0].labels
        chunks = await d.answer({"messages": HELLO, "tools": [TOOL], "stream": True, "max_tokens": 12})
        assert GENERATE in d.calls.taken() and joined(chunks)[0]


@pytest.mark.parametrize(
    ("render", "tokenizer", "routes", "generates"),
    [
        (None, False, True, True),
        (None, True, True, False),
        (None, False, False, False),
        ("off", False, True, False),
        ("engine", True, True, True),
        ("", True, False, False),
    ],
)
async def test_the_way_is_chosen_by_what_servers_can_do(
    render: str | None, tokenizer: bool, routes: bool, generates: bool
) -> None:
    async with door(render, tokenizer=tokenizer, routes=routes) as d:
        answer = await d.answer({"messages": HELLO, "max_tokens": 5})
        assert (GENERATE in d.calls.taken()) == generates
        exact = tokenizer or generates
        assert (d.s.records[-1].isl == answer["usage"]["prompt_tokens"]) == exact
        notes = [note for note in d.s.service.notes() if "no local tokenizer" in note]
        assert bool(notes) == (not exact)
        if render == "":
            assert "e0 has no generate route" in d.way


async def test_a_render_server_that_fails_between_tokens_and_words_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_renderer, "WORDS_TIMEOUT", 0.5)
    async with door() as d:
        expected = await d.answer({"messages": HELLO, "max_tokens": 9})
        d.calls.taken()
        words = d.s.service.renderer.words

        async def late(*given: Any) -> Any:
            await d.render.stop()
            return await words(*given)

        monkeypatch.setattr(d.s.service.renderer, "words", late)
        answer = await d.answer({"messages": HELLO, "max_tokens": 9})
        assert answer["choices"] == expected["choices"]
        assert d.calls.taken()[-1] == "/v1/chat/completions" and "put no words" in d.way
        assert d.s.records[-1].outcome == "ok" and d.s.records[-1].attempts == 1
        assert any(d.render.url in note for note in d.s.service.notes())


@pytest.mark.parametrize(("status", "found"), [(400, True), (422, True), (403, False), (404, False), (405, False)])
async def test_a_route_is_there_where_it_misses_its_fields(status: int, found: bool) -> None:
    """403: vLLM has the routes and has them switched off."""
    engine = Engine("e0")

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({}, status=404 if request.path.endswith("generate") else status)

    engine.reply = reply
    await engine.start()
    try:
        async with aiohttp.ClientSession() as http:
            routes = await token_routes(EngineServer(http, engine.url))
        assert routes == ({TOKEN_ROUTES: "render derender"} if found else {})
        assert len(engine.paths) == (3 if found else 1), "without the first none is asked for"
    finally:
        await engine.stop()


async def test_a_refusal_is_worded_by_the_usual_route() -> None:
    async with door(labels={TOKEN_ROUTES: "render generate derender"}, routes=False) as d:
        answer = await d.answer({"messages": HELLO, "max_tokens": 5})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert d.calls.taken()[-2:] == [GENERATE, "/v1/chat/completions"] and "answered 404" in d.way
    async with door() as d, door("off") as usual:
        body = {"messages": HELLO, "max_tokens": 100_000}
        assert (await d.answer(body)) == (await usual.answer(body))
