"""Background tasks of one object: kept until each has ended, as asyncio itself keeps none, and cancelled together."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from penstock.adapters.task_cancel import cancel_all


class BackgroundTasks:
    """Tasks that run beside their owner; its length is how many run."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator["asyncio.Task[None]"]:
        return iter(list(self._running))

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> "asyncio.Task[None]":
        """Begin to do some work."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def settled(self) -> None:
        """Wait until nothing runs any more; a caller that is cancelled cancels none of it."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Cancel everything, and wait until it has ended."""
        await cancel_all(self._running)
