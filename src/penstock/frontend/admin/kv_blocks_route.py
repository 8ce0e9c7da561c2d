"""Route of KV blocks: what this process knows of an engine, for another frontend that joins late."""

import msgspec
from aiohttp import web

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.service import service_of
from penstock.kernel.values import Target, WorkerId


async def give_kv_blocks(request: web.Request) -> web.Response:
    """GET /peer/kv-blocks/{worker}/{rank}."""
    target = Target(WorkerId(request.match_info["worker"]), int(request.match_info["rank"]))
    blocks = service_of(request).cluster.kv_blocks(target)
    if blocks is None:
        raise rejected(f"not all is known of {quoted(str(target))} here", "worker", code="not_found", status=404)
    return web.Response(body=msgspec.msgpack.encode(blocks))
