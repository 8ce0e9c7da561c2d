"""What a server says of itself: stock shapes are read, odd ones are left out, never fatal."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.adapters.engines.describe import ServerHealth, describe, listed_adapters, measured_speed
from penstock.adapters.engines.http.engine_http import EngineServer, PolledServer
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.kernel.errors import EngineError
from penstock.kernel.values import WorkerCard, WorkerId
from tests.adapters.answering import health_now
from tests.certificate import make_certificate

MODELS = {"data": [{"id": "m", "max_model_len": 4096}, {"id": "m-lora", "parent": "m"}]}
CARD = WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="http://m")
"""As it was described: a list that named the model then is to name it now."""
METRICS = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="512"} 1.0\n'


@asynccontextmanager
async def serving(routes: dict[str, Any], status: int = 200) -> AsyncIterator[str]:
    """Serve these answers (text, JSON; what is absent is a 404), and yield the URL."""

    async def answer(request: web.Request) -> web.Response:
        found = routes.get(request.path, routes.get("*"))
        if found is None:
            return web.Response(status=404)
        return web.Response(text=found, status=status) if isinstance(found, str) else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(routes: dict[str, Any], **more: Any) -> WorkerCard:
    """Serve these answers and describe the server."""
    async with serving(routes) as url, aiohttp.ClientSession() as http:
        assert isinstance(await health_now(url, card=CARD), ServerHealth)
        await measured_speed(http, url)
        return await describe(http, url, worker=WorkerId("w"), epoch=1, **more)


async def test_a_server_that_is_busy_is_known_from_one_that_is_gone() -> None:
    """A process that blocks takes connections, since the kernel does that for it, and answers none."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    busy = await health_now(url, 0.3, card=CARD)
    assert busy.silent and busy.lack == "no answer to its health check within 0.3 s"
    listener.close()
    assert await health_now(url, 0.3, card=CARD) == ServerHealth("no answer", silent=False)


@pytest.mark.parametrize(
    ("routes", "lack"),
    [
        ({"/health": "ok", "/v1/models": MODELS}, None),
        ({"/v1/models": MODELS}, None),
        (
            {"/health": "ok", "/v1/models": {"data": [{"id": "other"}]}},
            "does not serve 'm' any more; it lists ['other']",
        ),
        ({"/health": "ok"}, "/v1/models answers 404"),
        ({"*": "a page"}, "does not serve 'm' any more"),
        ({"/health": "ok", "/v1/models": {"data": 5}}, "does not serve 'm' any more; it lists []"),
    ],
)
async def test_a_healthy_server_that_serves_something_else_is_not_healthy(
    routes: dict[str, Any], lack: str | None
) -> None:
    async with serving(routes) as url:
        found = await health_now(url, card=CARD)
        assert not found.silent and (found.lack is None if lack is None else lack in (found.lack or ""))


async def test_a_server_of_ten_thousand_adapters_is_healthy() -> None:
    """Its list has more than a megabyte."""
    adapters = [{"id": f"adapter-{number:05}", "parent": "m", "root": "x" * 100} for number in range(10_000)]
    async with serving({"/health": "ok", "/v1/models": {"data": [*adapters, {"id": "m"}]}}) as url:
        assert (await health_now(url, card=CARD)).lack is None


async def test_a_server_that_limits_rates_is_busy() -> None:
    async with serving({"*": "slow down"}, 429) as url:
        assert await health_now(url, card=CARD) == ("/health answers 429", True)


async def test_a_stock_vllm_is_read_in_full() -> None:
    sources = {
        "1": {"endpoint": "tcp://127.0.0.1:2", "replay_endpoint": "tcp://127.0.0.1:4", "topic": "kv"},
        "0": {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:3", "topic": "kv"},
    }
    card = await asked({"/v1/models": MODELS, "/metrics": METRICS, "/kv_event_sources": sources})
    assert (card.model, card.max_model_len, card.block_size, card.kv_blocks, card.ranks) == ("m", 4096, 32, 512, 2)
    assert card.events == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2") and card.topic == "kv"
    assert card.adapters == ("m-lora",) and card.hash_scheme is None and card.engine == "vllm"


async def test_of_a_server_with_several_models_each_has_its_own_adapters() -> None:
    entries = [
        {"id": "m", "root": "org/m"},
        {"id": "m-too", "root": "org/m"},
        {"id": "n", "root": "org/n"},
        *({"id": f"{parent}-lora", "parent": parent} for parent in ("m", "m-too", "n", "unlisted")),
    ]
    routes = {"/v1/models": {"data": entries}}
    async with serving(routes) as url, aiohttp.ClientSession() as http:
        found = {name: await listed_adapters(http, url, name) for name in ("m", "n")}
        card = await describe(http, url, worker=WorkerId("w"), epoch=1, model="n")
    assert found == {"m": ("m-lora", "m-too-lora", "unlisted-lora"), "n": ("n-lora", "unlisted-lora")}
    assert card.model == "n" and card.adapters == found["n"]


async def test_a_plain_openai_server_tells_little_and_that_stays_unknown() -> None:
    card = await asked({"/v1/models": {"data": [{"id": "m"}]}})
    assert card.block_size is None and card.max_model_len is None and card.events == () and card.engine == "openai"


async def test_what_the_operator_knows_better_wins() -> None:
    card = await asked({"/v1/models": MODELS, "/metrics": METRICS}, overrides={"block_size": 16, "kv_blocks": None})
    assert card.block_size == 16 and card.kv_blocks == 512


@pytest.mark.parametrize(
    "odd", [{"status": "ok"}, {"0": "tcp://x"}, {"0": {}}, [1], "text", {"fit": {"decode_base": 1}}]
)
async def test_a_server_that_answers_anything_is_taken_as_a_plain_one(odd: Any) -> None:
    card = await asked({"/v1/models": {"data": [{"id": "m"}]}, "*": odd})
    assert card.model == "m" and card.events == ()


@pytest.mark.parametrize("listing", [{"data": []}, {"data": "x"}, [], "x", {"data": [{"id": 3}]}])
async def test_a_server_without_a_model_is_an_engine_error(listing: Any) -> None:
    with pytest.raises(EngineError):
        await asked({"/v1/models": listing})


async def test_a_wrong_model_is_named_with_the_right_ones() -> None:
    with pytest.raises(EngineError, match="m-lora"):
        await asked({"/v1/models": MODELS}, model="other")


async def test_nonsense_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="makes no sense"):
        await asked({"/v1/models": {"data": [{"id": "m", "max_model_len": "long"}]}})


async def test_nobody_there_is_an_engine_error() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match=r"does not answer \(is it up"):
            await describe(http, "http://127.0.0.1:9", worker=WorkerId("w"), epoch=1)
        with pytest.raises(EngineError, match=r"does not answer: the name .* nosuch.invalid can't be resolved: \w"):
            await describe(http, "http://nosuch.invalid:9", worker=WorkerId("w"), epoch=1)


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (
            401,
            "",
            "/v1/models answers 401: it asks for an API key: set pools.NAME.access.api_key_file or api_key_env"
            " to the right one",
        ),
        (404, "", "/v1/models answers with status 404 (is it an OpenAI-compatible server?)"),
        (200, "hello", "/v1/models answers without JSON (is it an OpenAI-compatible server?)"),
    ],
)
async def test_why_a_server_can_not_be_read_is_said_as_it_is(status: int, text: str, words: str) -> None:
    async with serving({"*": text}, status) as url, aiohttp.ClientSession() as http:
        with pytest.raises(EngineError) as caught:
            await describe(http, url, worker=WorkerId("w"), epoch=1)
        assert words in str(caught.value)


def _raw(*answers: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    return serve


async def _mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: "


@pytest.mark.parametrize(
    "serve",
    [
        _raw(HEAD + b"2\r\n\r\nok"),
        _raw(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"),
        _raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
        _raw(HEAD + b"2\r\n\r\n\xff\xfe"),
        _raw(HEAD + b"900\r\n\r\nok"),
        _raw(b"nonsense\r\n\r\n"),
        _raw(),
        _mute,
        None,
    ],
    ids=["fine", "busy", "chunked", "no text", "broken off", "no HTTP", "hangs up", "mute", "nobody"],
)
async def test_a_server_is_polled_with_the_words_with_which_it_is_described(serve: Any) -> None:
    """Status, text, whether it was silent and what is wrong with it: by both clients."""
    url, server = "http://127.0.0.1:9", None
    if serve is not None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    calls = Http1Client()
    async with aiohttp.ClientSession() as http:
        found = []
        for asked_by in (EngineServer(http, url, 1.0), PolledServer(calls, url, 1.0)):
            text = await asked_by.text("/health")
            found.append((await asked_by.status("/health"), text, asked_by.silent, asked_by.fault))
        assert found[0] == found[1]
    await calls.close()
    if server is not None:
        server.close()


async def test_a_name_that_is_none_and_a_certificate_that_is_not_trusted_are_named(tmp_path: Path) -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*make_certificate(tmp_path))
    server = await asyncio.start_server(_mute, "127.0.0.1", 0, ssl=served)
    calls = Http1Client()
    nowhere = PolledServer(calls, "http://nosuch.invalid:9")
    assert await nowhere.status("/health") is None
    assert "the name of the server nosuch.invalid can't be resolved: " in nowhere.reason
    async with aiohttp.ClientSession() as http:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        for strange in (EngineServer(http, url), PolledServer(calls, url)):
            assert await strange.status("/health") is None
            assert "access.ca of its pool names the certificates that are trusted" in strange.reason
    await calls.close()
    server.close()
