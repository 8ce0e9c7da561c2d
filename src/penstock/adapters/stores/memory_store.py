"""Memory `Store` for discovery inside one process, for tests and the simulator: the contract of any other store."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.adapters.seams import StoreChange, StoreUnavailable, changes_between
from penstock.adapters.stores.entry_codec import check_entry


class MemorySpace:
    """The space that several `MemoryStore` handles share, as several processes share a directory.

    ``outage``: set it to a text, and every handle raises `StoreUnavailable` until it is None again.
    """

    def __init__(self) -> None:
        self.outage: str | None = None
        self.values: dict[str, bytes] = {}
        self.changed: set[asyncio.Event] = set()

    def change(self) -> None:
        """Wake all watchers."""
        for event in self.changed:
            event.set()


class MemoryStore:
    """A `Store` in memory. A lease lasts until its handle is closed: handles of one process die together."""

    def __init__(self, space: MemorySpace | None = None) -> None:
        self.space = MemorySpace() if space is None else space
        self._mine: dict[str, bytes] = {}
        self._closed = False

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value."""
        check_entry(key, value, ttl)
        self._check()
        if ttl is None:
            self._mine.pop(key, None)
        else:
            self._mine[key] = value
        self.space.values[key] = value
        self.space.change()

    async def delete(self, key: str) -> None:
        """Delete a key."""
        self._check()
        self._mine.pop(key, None)
        if self.space.values.pop(key, None) is not None:
            self.space.change()

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix."""
        self._check()
        return {key: value for key, value in self.space.values.items() if key.startswith(prefix)}

    async def watch(self, prefix: str) -> AsyncIterator[Sequence[StoreChange]]:
        """Yield everything alive, then the changes. It keeps only what is alive, however slow the reader is."""
        known: dict[str, bytes] | None = None
        event = asyncio.Event()
        self.space.changed.add(event)
        try:
            while not self._closed:
                event.clear()
                alive = await self.list(prefix)
                changes = changes_between(known or {}, alive)
                if changes or known is None:
                    yield changes
                known = alive
                await event.wait()
        finally:
            self.space.changed.discard(event)

    async def close(self) -> None:
        """Delete our leased keys."""
        if self._closed:
            return
        self._closed = True
        for key, value in self._mine.items():
            if self.space.values.get(key) is value:
                del self.space.values[key]
        self._mine.clear()
        self.space.change()

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable("this store was closed")
        if self.space.outage is not None:
            raise StoreUnavailable(self.space.outage)
