"""Ways to and from a disk: direct pwritev and preadv in threads, and the tiers' disk store."""

import asyncio
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from memory import Ways
from sizes import TOTAL

from penstock_kv.transfer.storage.block_store import BlockIo
from penstock_kv.transfer.storage.disk_store import DiskStore

THREADS = 8
"""Direct calls at once: from here on more were no faster."""


def raw_calls(
    path: Path, memory: mmap.mmap, pool: ThreadPoolExecutor, write: bool
) -> Callable[[int], Awaitable[float]]:
    """The limit: `THREADS` threads, each with its share of blocks."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.pwritev(file, [memory], 0)
    view = memoryview(memory)

    def share(number: int, block: int) -> None:
        for at in range(number * block, TOTAL, THREADS * block):
            part = [view[at : at + block]]
            count = os.pwritev(file, part, at) if write else os.preadv(file, part, at)
            assert count == block

    def run(block: int) -> float:
        start = time.perf_counter()
        for future in [pool.submit(share, number, block) for number in range(THREADS)]:
            future.result()
        return time.perf_counter() - start

    async def calls(block: int) -> float:
        return await asyncio.to_thread(run, block)

    return calls


def store_calls(folder: Path, memory: mmap.mmap, write: bool) -> Callable[[int], Awaitable[float]]:
    """The disk tier's store: header, key, generation and checksum with every block. One store per block size."""
    stores: dict[int, DiskStore] = {}
    view = memoryview(memory)

    async def calls(block: int) -> float:
        count = TOTAL // block
        blocks = [
            BlockIo(slot, slot.to_bytes(32, "big"), 1, view[slot * block : (slot + 1) * block]) for slot in range(count)
        ]
        if block not in stores:
            for other in list(stores):
                await stores.pop(other).close()
            place = folder / f"store-{write}-{block}"
            place.mkdir()
            stores[block] = DiskStore([place], block, count)
            await stores[block].write(blocks, 120)
        start = time.perf_counter()
        call = stores[block].write if write else stores[block].read
        results = await call(blocks, 120)
        seconds = time.perf_counter() - start
        assert {result.outcome for result in results} == {"ok"}, results[:3]
        return seconds

    return calls


@asynccontextmanager
async def disk(folder: Path) -> AsyncIterator[Ways]:
    """Direct calls and a store, on the same disk."""
    memory = mmap.mmap(-1, TOTAL)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.resize(np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8), TOTAL)
    with ThreadPoolExecutor(THREADS) as pool:
        yield {
            direction: {
                "direct calls": raw_calls(folder / f"raw-{direction}.bin", memory, pool, direction == "write"),
                "disk store": store_calls(folder, memory, direction == "write"),
            }
            for direction in ("write", "read")
        }
