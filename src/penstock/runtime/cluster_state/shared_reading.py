"""Shared reading: what many wait for in the store, read once for all of them and never more often than is of use."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from penstock.adapters.task_cancel import cancel_all

SHARE = 1
"""A reading is followed by a pause of so many times what it took: a slow store, or a large one, is read less often."""

T = TypeVar("T")


class SharedReading(Generic[T]):
    """Readings of something; five hundred who wait for it cost as many reads as one.

    Args:
        read: reads it.
        every: seconds, at least, from the end of a reading to the next (see `SHARE`).
    """

    def __init__(self, read: Callable[[], Awaitable[T]], every: float) -> None:
        self._read = read
        self._every = every
        self._again = 0.0
        self._begun: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def next(self) -> T:
        """Return a reading that begins after this call, or raise what it raised."""
        if self._next is None:
            self._next = asyncio.create_task(self._one(self._begun), name="shared reading")
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """End the readings; whoever waits for one is cancelled."""
        await cancel_all(task for task in (self._begun, self._next) if task is not None)

    async def _one(self, before: "asyncio.Task[T] | None") -> T:
        now = asyncio.get_running_loop().time
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(self._again - now())
        self._begun, self._next = self._next, None
        began = now()
        try:
            return await self._read()
        finally:
            self._again = now() + max(self._every, SHARE * (now() - began))
