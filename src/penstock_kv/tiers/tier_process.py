"""Tier process: opens tiers as the settings say, serves until SIGTERM, and shows its metrics over HTTP."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from penstock.adapters.process_life import report_ready, stop_event
from penstock.adapters.telemetry.prometheus_text import CONTENT_TYPE
from penstock.kernel.errors import ConfigError, bind_hint
from penstock_kv.blocks.tiers.tier_events import TierName
from penstock_kv.blocks.tiers.tier_machine import TierMachine
from penstock_kv.blocks.tiers.tier_settings import TierSettings
from penstock_kv.cache_settings import CacheSettings
from penstock_kv.inside.tier_protocol import TierHello
from penstock_kv.tiers.peer_tiers import PeerTiers
from penstock_kv.tiers.tier_node import OpenTiers, TierNode
from penstock_kv.tiers.tier_server import TierServer
from penstock_kv.transfer.storage.block_store import BlockStore
from penstock_kv.transfer.storage.disk_store import DiskStore
from penstock_kv.transfer.storage.host_slab import HostSlab
from penstock_kv.transfer.storage.object_store import ObjectStore
from penstock_kv.transfer.storage.record_header import SECTOR
from penstock_kv.transfer.storage.slab_file import whole_sectors

log = logging.getLogger("penstock.kv_tiers")

OBJECT_BLOCKS = 1 << 18
"""Blocks that one engine has in an object store at most: some 100 MB of index here, 512 GiB of blocks of 2 MiB."""
BLOCKS_LEAST = 8
"""Blocks of the smallest host tier: what is under way and what is wanted must fit beside each other."""


async def run_tiers(
    settings: CacheSettings, socket: Path, *, peers: PeerTiers | None = None, host: str = "127.0.0.1"
) -> int:
    """Serve the tiers of engines until SIGTERM or SIGINT; return the exit status.

    The first line on standard output reports readiness, as JSON.

    Args:
        peers: other engines' host tiers.
        host: where the metrics are, at settings.metrics_port.
    Raises:
        ConfigError: the socket or the port is taken.
    """
    stopping = stop_event()
    node, metrics_port = TierNode(opener(settings), peers), settings.metrics_port
    server = TierServer(node, socket)
    metrics = await _serve_status(node, host, metrics_port) if metrics_port else None
    try:
        await server.start()
        url = f"http://{host}:{metrics_port}/metrics" if metrics_port else None
        report_ready(pid=os.getpid(), socket=str(socket), metrics=url)
        node.failed.add_done_callback(lambda _: stopping.set())
        await stopping.wait()
    finally:
        await server.close()
        if metrics is not None:
            await metrics.cleanup()
    if node.failed.done():
        log.error("this process ends; until it is there again, its engine has no tiers: %s", node.failed.exception())
        return 1
    return 0


def opener(settings: CacheSettings) -> Callable[[TierHello], Awaitable[OpenTiers]]:
    """Return what opens the tiers for an engine's kind of blocks."""

    async def open_tiers(hello: TierHello) -> OpenTiers:
        return await asyncio.to_thread(_open_tiers, settings, hello)

    return open_tiers


def _open_tiers(settings: CacheSettings, hello: TierHello) -> OpenTiers:
    size = hello.row_bytes
    capacity: dict[TierName, int] = {
        "host": settings.host // whole_sectors(size),
        "disk": settings.disk // (SECTOR + whole_sectors(size)),
        "object": 0 if settings.object_url is None else OBJECT_BLOCKS,
    }
    if capacity["host"] < BLOCKS_LEAST:
        raise ConfigError(
            f"{settings.host} bytes of host memory are {capacity['host']} blocks of {size} bytes",
            hint=f"give at least {BLOCKS_LEAST} blocks",
        )
    machine = TierMachine(
        TierSettings(
            block_bytes=size,
            block_tokens=hello.block_tokens,
            host_blocks=capacity["host"],
            disk_blocks=capacity["disk"],
            object_blocks=capacity["object"],
            order=settings.order,
            offload=settings.offload,
            write=settings.write,
        )
    )
    lower: dict[TierName, BlockStore] = {}
    if capacity["disk"]:
        lower["disk"] = DiskStore([Path(folder) for folder in settings.disk_dirs], size, capacity["disk"])
    if settings.object_url is not None:
        lower["object"] = ObjectStore(settings.object_url, size, OBJECT_BLOCKS)
    slab = HostSlab(size, capacity["host"])
    return OpenTiers(machine, slab, lower, {tier: blocks for tier, blocks in capacity.items() if blocks})


async def _serve_status(node: TierNode, host: str, port: int) -> web.AppRunner:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=node.render_metrics().encode(), headers={"content-type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"metrics port {port} on {host} can't be bound: {error.strerror or error}",
            hint=bind_hint(error, "choose one that is free, or 0 for none"),
        ) from error
    return runner
