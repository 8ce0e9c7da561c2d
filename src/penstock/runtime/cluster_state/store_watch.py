"""Store watch: follows a prefix for ever; frozen while the store can't be read, reconciled after that.

A `SharedReading` is for what many wait for: read once for all of them, and never more often than is of use.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.task_cancel import cancel_all

RETRY = 1.0
"""Seconds between tries to read a store that can't be read."""
SHARE = 1
"""A reading is followed by a pause of so many times what it took: a slow store, or a large one, is read less often."""
T = TypeVar("T")


async def follow(
    store: Store,
    prefix: str,
    *,
    known: Callable[[], Iterable[str]],
    put: Callable[[str, bytes], Awaitable[None]],
    deleted: Callable[[str], Awaitable[None]],
    frozen: Callable[[StoreUnavailable | None], None],
    read: Callable[[], None] = lambda: None,
) -> None:
    """Watch a prefix until cancelled.

    Args:
        known: the keys that count as alive; those that ended during an outage are then ``deleted``.
        put: called with each key and its value, also unchanged ones.
        deleted: called with each key that went away.
        frozen: called with the error while the store can't be read, and with None whenever it can.
        read: called whenever all reported changes have been passed on.
    """
    while True:
        try:
            first = True
            async for changes in store.watch(prefix):
                frozen(None)
                if first:  # the first batch is everything that is alive
                    alive = {change.key for change in changes if change.value is not None}
                    for key in [key for key in known() if key not in alive]:
                        await deleted(key)
                    first = False
                for change in changes:
                    if change.value is None:
                        await deleted(change.key)
                    else:
                        await put(change.key, change.value)
                read()
        except StoreUnavailable as error:
            frozen(error)
        await asyncio.sleep(RETRY)


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
