"""The batches of a KV event subscription one by one, as a test wants them."""

import asyncio
from collections.abc import AsyncIterator

from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.seams import KvBatch


async def batches_of(subscriber: KvSubscriber) -> AsyncIterator[KvBatch]:
    """Subscribe at the first call; yield batches in the order in which they arrive."""
    queue: asyncio.Queue[KvBatch | Exception] = asyncio.Queue()
    subscriber.listen(queue.put_nowait, queue.put_nowait)
    subscriber.release()
    while True:
        item = await queue.get()
        if isinstance(item, Exception):
            raise item
        yield item
