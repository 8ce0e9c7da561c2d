"""`SharedObjects`: takes blocks into the object tier that other engines have stored since it was opened."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.tiers.tier_moves import BlockTier
from penstock_kv.transfer.storage.block_store import StoredRecord
from penstock_kv.transfer.storage.object_store import ObjectStore

log = logging.getLogger("penstock.kv_tiers")

PERIOD = 10.0
"""Seconds between two parts of a listing: so 10,000 objects are looked at every 10 s, at one request per second, which
is little beside what blocks cost; of 262,144, the most that a tier has, a new one is seen after 5 minutes."""


class SharedObjects:
    """Listing is the simpler way that is right: an object's name has its parent, which a look-up by key can't know.

    Only empty slots are used: what others have stored never makes a block of this engine give way. Who stored a block
    may delete it at any time; reading it is a miss then.

    Args:
        take: enters records that are in the store by now.
    """

    def __init__(self, store: ObjectStore, tier: BlockTier, take: Callable[[Sequence[StoredRecord]], None]) -> None:
        self._store = store
        self._tier = tier
        self._take = take

    async def follow(self) -> None:
        """Look at one part after the other, over and over."""
        after = ""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                after = await self.look(after)
            except OSError as error:
                log.warning("object tier: it can't be listed, and what others store is seen later: %s", error)

    async def look(self, after: str = "") -> str:
        """Look at one part; return the path after which the next one begins."""
        names, end = await self._store.listed(after)
        index = self._tier.index
        fresh = {name.key: name for name in names if BlockKey(name.key) not in index}
        slots = self._tier.manager.empty_slots(len(fresh))
        records = [StoredRecord(slot, *name) for slot, name in zip(slots, fresh.values())]
        for slot, name in zip(slots, fresh.values()):
            self._store.adopt(slot, name)
        if records:
            log.info("object tier: %d blocks of other engines are there now", len(records))
            self._take(records)
        return end
