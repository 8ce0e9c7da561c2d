"""Simulated servers in tests: engines that speak vLLM's HTTP and KV events on loopback, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_server import RunningServer, start


@asynccontextmanager
async def simulated_servers(
    count: int = 1, settings: SimSettings | None = None, *, model: str = "sim"
) -> AsyncIterator[list[RunningServer]]:
    """Serve a model with so many engines until the end of the block; each has its ``url``."""
    servers: list[RunningServer] = []
    try:
        for _ in range(count):
            servers.append(await start(settings or SimSettings(), model=model))
        yield servers
    finally:
        for server in servers:
            await server.stop()
