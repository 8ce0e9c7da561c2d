"""What does an operator say of servers that do not tell, and does `penstock doctor` agree with the engines?"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.live.cluster import Served, served
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.heard import all_heard, worker_status
from tests.vllm.load import Prompts
from tests.vllm.server import BLOCK, VllmServer
from tests.vllm.truth import Truth
from tests.vllm.waiting import eventually

Servers = tuple[VllmServer, VllmServer]

QUIET = ["--frontend.port", "0", "--canary.idle", "0", "--router.index.predicted_ttl", "0"]


async def test_event_endpoints_that_a_server_does_not_tell_can_be_given(
    servers: Servers, checkpoint: Path, truths: dict[str, Truth], tmp_path: Path
) -> None:
    server, truth = servers[1], truths["attached-1"]
    told = server.get("/kv_event_sources")["0"]
    prompts = Prompts(seed=81)
    given = ["--events", told["endpoint"], "--replay", told["replay_endpoint"], "--topic", told["topic"]]
    async with asking() as http, silent(http, server) as url:
        for arguments, index in (([], "none"), (given, "exact")):
            with ExitStack() as stack:
                # In a thread: the server in between is on this loop.
                front = await asyncio.to_thread(stack.enter_context, attached(tmp_path, [url], checkpoint, *arguments))
                await eventually(lambda f=front, i=index: worker_status(f, "attached-0")["index"] == i)
                if index == "exact":
                    await all_heard(front, {"attached-0": truth})
                    prompt = prompts.fresh(4 * BLOCK + 1)
                    for cached in (0, 4 * BLOCK):
                        answer = await ask(http, front.url, completion(prompt, 1))
                        assert (answer.expected, answer.cached) == (cached, cached)
                        await all_heard(front, {"attached-0": truth})
                await asyncio.to_thread(stack.close)


def test_the_doctor_agrees_with_the_engines(front: Served) -> None:
    status, findings = doctor(front)
    assert status == 0, findings
    assert [f for f in findings if f["level"] in ("error", "warning") and "attached" in f["text"]] == []
    for worker in ("attached-0", "attached-1"):
        assert any(f["level"] == "ok" and worker in f["text"] for f in findings), findings


async def test_the_doctor_finds_a_tokenizer_that_is_not_the_engines(servers: Servers, tmp_path: Path) -> None:
    with attached(tmp_path, [servers[1].url], "builtin:sim") as front:
        await eventually(lambda: worker_status(front, "attached-0")["index"] == "exact")
        status, findings = doctor(front)
    assert status == 1
    assert any(f["level"] == "error" and "token" in f["text"] for f in findings), findings


@contextmanager
def attached(folder: Path, urls: list[str], tokenizer: object, *arguments: str) -> Iterator[Served]:
    with served(folder, "attach", *urls, "--tokenizer", str(tokenizer), *QUIET, *arguments) as cluster:
        yield cluster


def doctor(front: Served) -> tuple[int, list[dict[str, Any]]]:
    said = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--url", front.url, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert said.stdout, said.stderr
    return said.returncode, json.loads(said.stdout)["findings"]


@asynccontextmanager
async def silent(http: aiohttp.ClientSession, server: VllmServer) -> AsyncIterator[str]:
    """Stand before a server and leave out /kv_event_sources, as older ones do; yield the URL."""

    async def forward(request: web.Request) -> web.StreamResponse:
        if request.path == "/kv_event_sources":
            return web.Response(status=404)
        asked = {"content-type": request.headers.get("content-type", "application/json")}
        body = await request.read()
        async with http.request(request.method, server.url + request.path, data=body, headers=asked) as answer:
            body = await answer.read()
            kind = answer.headers.get("content-type", "text/plain")
            return web.Response(status=answer.status, body=body, headers={"content-type": kind})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
