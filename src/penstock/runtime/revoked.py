"""What becomes of a worker or a frontend whose lease an operator revoked in the store? It is drained.

docs/why/leases-in-etcd.md says why. The routers forget it at once, as its key is gone; what runs on it finishes.
"""

import asyncio
import logging

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.runtime.follow import RETRY
from penstock.runtime.membership import WORKERS
from penstock.runtime.peers import FRONTENDS
from penstock.runtime.wishes import DRAINS, DrainWish, put

log = logging.getLogger("penstock.membership")

BY = "a revoked lease"


class Revoked:
    """Turns revoked keys of this process into wishes to drain what they stood for: `add` them, and `run` it."""

    def __init__(self) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue()

    def add(self, key: str) -> None:
        """Take a key up; one that stands for nothing that can be drained is left alone."""
        self._keys.put_nowait(key)

    async def run(self, store: Store) -> None:
        """Write the wishes until cancelled; one that can't be written is written later."""
        while True:
            name = drained_by(await self._keys.get())
            while name is not None:
                try:
                    await put(store, DRAINS + name, DrainWish(by=BY))
                    break
                except StoreUnavailable as error:
                    log.warning("the wish to drain %s can't be written: %s", name, error)
                    await asyncio.sleep(RETRY)


def drained_by(key: str) -> str | None:
    """Return the worker (``main-0``) or frontend (``frontend-1``) that a key stands for, or None."""
    if key.startswith(WORKERS):
        return key.removeprefix(WORKERS)
    if key.startswith(FRONTENDS):
        return key.removeprefix(FRONTENDS).rpartition("-")[0] or None
    return None
