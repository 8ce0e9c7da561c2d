"""A server that gives these answers to GETs, whatever engine it plays."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


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
