"""How does a test on an event loop wait for a condition that is looked up over HTTP?"""

import asyncio
from collections.abc import Callable

LIMIT = 30.0


async def eventually(met: Callable[[], bool], limit: float = LIMIT, story: Callable[[], object] = str) -> None:
    """Wait until ``met()``, which may block, is true; fail with ``story()`` when it is not within ``limit`` seconds."""
    try:
        async with asyncio.timeout(limit):
            while not await asyncio.to_thread(met):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {limit:g} s: {story()}") from None
