"""Batch claim: a key in the discovery store by which one frontend process at a time runs batches."""

from penstock.adapters.seams import Store

PREFIX = "batch-runners/"


class BatchClaim:
    """The claim of one process.

    Two processes that claim at once may both step back, but never both get it: each writes before it looks, so at
    least the later one sees the other. The key goes away with its process, after ``ttl`` seconds at most.
    """

    def __init__(self, store: Store, name: str, ttl: float) -> None:
        self._store = store
        self._key = PREFIX + name
        self._ttl = ttl
        self.owned = False
        """Whether this process runs batches."""

    async def take(self) -> bool:
        """Return whether this process may run batches; raises StoreUnavailable where nobody knows."""
        keys = await self._store.list(PREFIX)
        if self.owned and self._key in keys:
            return True
        self.owned = False
        if keys.keys() - {self._key}:
            return False
        await self._store.put(self._key, b"1", ttl=self._ttl)
        if (await self._store.list(PREFIX)).keys() == {self._key}:
            self.owned = True
        else:
            await self._store.delete(self._key)
        return self.owned

    async def release(self) -> None:
        """Let another process run batches."""
        if self.owned:
            self.owned = False
            await self._store.delete(self._key)
