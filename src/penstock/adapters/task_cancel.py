"""Cancels tasks until all have ended: before Python 3.12 `asyncio.wait_for` may lose a cancel."""

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN = 0.1
"""Seconds until a task that still runs is cancelled once more."""


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks once and wait until all have ended, however long they clean up. Results and errors are not read."""
    running = list(tasks)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def end(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks until all of them have ended. Their results and errors are not read."""
    left = [task for task in tasks if task is not asyncio.current_task()]
    while left := [task for task in left if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN)
