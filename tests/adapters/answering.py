"""A server that gives these answers to GETs, whatever engine it plays."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.adapters.engines.describe import ServerHealth, health
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.kernel.values import WorkerCard


@asynccontextmanager
async def answering(routes: dict[str, Any]) -> AsyncIterator[str]:
    """Serve text, JSON, or a status with a text; what is absent is a 404, ``*`` is all the rest. Gives the URL."""

    async def answer(request: web.Request) -> web.Response:
        found = routes.get(request.path, routes.get("*"))
        if found is None:
            return web.Response(status=404)
        if isinstance(found, tuple):
            return web.Response(status=found[0], text=found[1])
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def health_now(url: str, timeout: float = 5.0, *, card: WorkerCard | None) -> ServerHealth:
    """Ask a server of model m for its health, over a connection of its own."""
    calls = Http1Client()
    try:
        return await health(calls, url, timeout, "m", card=card)
    finally:
        await calls.close()
