"""Locks of a store's keys: writes of one key follow one another, those of others do not wait."""

import asyncio
from weakref import WeakValueDictionary


class KeyLocks:
    """One lock per key, for as long as somebody has it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """Return the lock of a key."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock
