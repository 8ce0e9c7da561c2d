"""Are prompts routed by the tokens of a render server where the model has one, and by our own where that fails?"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.frontend.prompt import prompt_renderer
from penstock.frontend.prompt.prompt_renderer import RenderedPrompt
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.kernel.hashing import block_hashes
from tests.frontend.stand import Engine, Stand, answer_well, eventually, stand
from tests.media_files import png

TOKENS = list(range(100, 150))
PNG = base64.b64encode(png(28, 28)).decode()


@asynccontextmanager
async def rendered(
    reply: Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]], *, by: str = ""
) -> AsyncIterator[tuple[Stand, Engine]]:
    """Serve a model whose prompts a server renders; ``by``: the setting, if it is not that server's URL."""
    server = Engine("renderer")
    server.reply = reply
    await server.start()
    model = ModelSettings(tokenizer="given", render=by or server.url, pools={"main": PoolSettings()})
    try:
        async with stand(settings=ClusterSettings(models={"m": model}), tokenizer=load_tokenizer("builtin:sim")) as s:
            yield s, server
    finally:
        await server.stop()


async def tokens(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as vLLM 0.32 does, as far as anybody reads it."""
    rendered = {"request_id": "chatcmpl-1", "token_ids": TOKENS, "features": None, "model": body["model"]}
    return web.json_response([rendered] if "prompt" in body else rendered)


async def blocks(s: Stand, **body: Any) -> Any:
    """Return the hashes of the blocks by which a request was routed."""
    if "prompt" in body:
        answer = await s.http.post("/v1/completions", json={"model": "m", **body})
    else:
        answer = await s.chat(**body)
    assert answer.status == 200, await answer.text()
    return s.records[-1].isl


async def test_the_tokens_of_the_server_name_the_blocks() -> None:
    async with rendered(tokens) as (s, server):
        assert await blocks(s, text="hello " * 50) == len(TOKENS)
        assert await blocks(s, prompt="hello " * 50) == len(TOKENS)
        assert server.paths == ["/v1/chat/completions/render", "/v1/completions/render"]
        assert json.loads(server.bodies[0])["messages"] == [{"role": "user", "content": "hello " * 50}]
        ticket = s.service.catalog.hashing(s.service.catalog.resolve("m"), None)
        parsed = await s.service.prompts.parse("completions", msgspec.json.encode({"model": "m", "prompt": "x"}))
        given = await s.service.renderer.rendered(parsed, (server.url,))
        assert isinstance(given, RenderedPrompt) and given.tokens == TOKENS and not given.derenders
        prompt = await s.service.prompts.prepare(parsed, None, ticket, given.tokens)
        assert prompt.blocks == block_hashes(TOKENS, 4) and not prompt.estimated


async def test_an_engine_renders_its_own_prompts() -> None:
    async with rendered(tokens, by="engine") as (s, server):

        async def both(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (tokens if request.path.endswith("/render") else answer_well)(request, body)

        s.engines[0].reply = both
        assert await blocks(s) == len(TOKENS)
        assert s.engines[0].paths == ["/v1/chat/completions/render", "/v1/chat/completions"] and not server.paths


async def test_media_token_ids_and_given_tokens_are_not_rendered() -> None:
    async with rendered(tokens) as (s, server):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
        s.service.cluster._node.feeds = type("Feeds", (), {"images": {}})()  # type: ignore[attr-defined]
        await blocks(s, messages=[{"role": "user", "content": [image]}])
        assert await blocks(s, prompt=[1, 2, 3]) == 3
        assert await blocks(s, nvext={"token_data": [1, 2]}) == 2
        assert server.paths == []


async def disabled(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)


async def garbage(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="[]")


async def silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("reply", "words"), [(disabled, "answered 403"), (garbage, "Expected"), (silent, "no answer within")]
)
async def test_a_server_that_fails_is_left_alone_and_named(
    monkeypatch: pytest.MonkeyPatch, reply: Any, words: str
) -> None:
    monkeypatch.setattr(prompt_renderer, "TIMEOUT", 0.05 if reply is silent else 5.0)
    async with rendered(reply) as (s, server):
        own = await blocks(s)
        assert own not in (0, len(TOKENS)) and await blocks(s) == own
        assert len(server.paths) == 1, "it is not asked again at once"
        (note,) = [note for note in (await (await s.http.get("/health")).json())["notes"] if "render" in note]
        assert words in note and server.url in note
        server.reply = tokens
        monkeypatch.setattr(prompt_renderer, "TIMEOUT", 5.0)
        monkeypatch.setattr(s.service.renderer, "_paused", {})
        assert await blocks(s) == len(TOKENS)
        assert not s.service.renderer.notes()


async def test_what_the_server_refuses_the_engine_refuses_itself() -> None:
    async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with rendered(refuses) as (s, server):
        await blocks(s)
        await blocks(s)
        assert len(server.paths) == 2 and not s.service.renderer.notes()
        await server.stop()
        await blocks(s)
        await eventually(lambda: s.service.renderer.notes())
