"""A server that speaks the streaming dialect, with answers and faults that a test chooses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[int, dict[str, Any]], "Answer"]


@dataclass
class Answer:
    """What the server does with one request; its tokens come once ``after`` requests are there."""

    status: int = 200
    after: int = 0
    chunks: list[int] = field(default_factory=lambda: [1, 4, 4])
    gap: float = 0.005
    usage: bool = True
    cached: int | None = 64
    worker: str = "sim-0"
    done: bool = True
    hang: bool = False
    cut: bool = False


@dataclass
class FakeServer:
    """The address, and every body that came in."""

    url: str
    bodies: list[dict[str, Any]]
    headers: list[dict[str, str]]


@asynccontextmanager
async def fake_server(script: Script | None = None, models: tuple[str, ...] = ("sim",)) -> AsyncIterator[FakeServer]:
    """Serve on a port that the system chooses."""
    server = FakeServer("", [], [])

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number = len(server.bodies)
        server.bodies.append(body)
        server.headers.append({name.lower(): value for name, value in request.headers.items()})
        answer = Answer() if script is None else script(number, body)
        if answer.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=answer.status)
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-penstock-worker": answer.worker,
                "x-penstock-queue-ms": "1.5",
                "x-penstock-expected-cached-tokens": "64",
            }
        )
        await response.prepare(request)
        if answer.hang:
            await asyncio.sleep(30)
        while len(server.bodies) < answer.after:
            await asyncio.sleep(0.005)
        chat = "messages" in body
        isl = len(body["prompt"]) if not chat else sum(len(each["content"]) for each in body["messages"])
        sent = 0
        for tokens in answer.chunks:
            sent += tokens
            choice = {"index": 0, **({"delta": {"content": "x"}} if chat else {"text": "x"})}
            event: dict[str, Any] = {"choices": [choice]}
            if answer.usage:
                event["usage"] = {"prompt_tokens": isl, "completion_tokens": sent}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(answer.gap)
        if answer.cut:
            assert request.transport is not None
            request.transport.close()
            return response
        usage = {"prompt_tokens": isl, "completion_tokens": sent}
        if answer.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.cached}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if answer.done:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]})

    async def status(_: web.Request) -> web.Response:
        return web.json_response({"models": [{"name": name, "block_size": 64} for name in models]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/admin/status", status)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
