"""Revoked leases: drains a worker or frontend whose lease an operator revoked in the store.

docs/why/leases-in-etcd.md says why. The routers forget it at once, as its key is gone; its running requests finish.
"""

import asyncio
import logging

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.runtime.cluster_state.desired_state import DRAINS, DrainSpec, put
from penstock.runtime.cluster_state.membership import WORKERS
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.store_watch import RETRY

log = logging.getLogger("penstock.membership")

BY = "a revoked lease"


class RevokedLeases:
    """Turns revoked keys of this process into `DrainSpec`s of their workers and frontends: `add` keys, and `run` it."""

    def __init__(self) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue()

    def add(self, key: str) -> None:
        """Take a key; one that is of nothing that can be drained is ignored."""
        self._keys.put_nowait(key)

    async def run(self, store: Store) -> None:
        """Write the specs until cancelled; one that can't be written is written later."""
        while True:
            name = drained_by(await self._keys.get())
            while name is not None:
                try:
                    await put(store, DRAINS + name, DrainSpec(by=BY))
                    break
                except StoreUnavailable as error:
                    log.warning("the desired drain of %s can't be written: %s", name, error)
                    await asyncio.sleep(RETRY)


def drained_by(key: str) -> str | None:
    """Return the worker (``main-0``) or frontend (``frontend-1``) of a key, or None."""
    if key.startswith(WORKERS):
        return key.removeprefix(WORKERS)
    if key.startswith(FRONTENDS):
        return key.removeprefix(FRONTENDS).rpartition("-")[0] or None
    return None
