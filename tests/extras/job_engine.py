"""Job engine: a server of images, files or videos in the place of one, for tests of what sticks to its engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web


class JobEngine:
    """A server; a kind of it adds routes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        self.add_routes(app)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def add_routes(self, app: web.Application) -> None:
        """Add what it serves."""
        raise NotImplementedError

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


E = TypeVar("E", bound=JobEngine)


@asynccontextmanager
async def running(engines: list[E]) -> AsyncIterator[list[E]]:
    """Start engines, and end them after the block."""
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()
