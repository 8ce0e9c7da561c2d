"""How does a test on an event loop wait for a condition that is looked up over HTTP?"""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.live.cluster import Served
from tests.vllm.server import START_LIMIT

LIMIT = 30.0


async def eventually(met: Callable[[], bool], limit: float = LIMIT, story: Callable[[], object] = str) -> None:
    """Wait until ``met()``, which may block, is true; fail with ``story()`` when it is not within ``limit`` seconds."""
    try:
        async with asyncio.timeout(limit):
            while not await asyncio.to_thread(met):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {limit:g} s: {story()}") from None


async def comes_back(cluster: Served, worker: str, epoch: int) -> dict[str, Any]:
    """Wait until a killed worker serves in a later life than that of ``epoch``; return its row in the status.

    The row of the life before is there until it is missed, perhaps for longer than its last requests run.
    """
    found: list[dict[str, Any]] = []

    def serves() -> bool:
        rows = cluster.get("/admin/status")[1]["workers"]
        found[:] = [row for row in rows if row["id"] == worker and row["epoch"] > epoch and row["state"] == "ready"]
        return bool(found)

    await eventually(serves, START_LIMIT)
    return found[0]
