"""Speed of the block stores beside the raw calls of the same size: direct pwritev/preadv, and one copy of memory.

    python bench/block_stores.py [FOLDER]

FOLDER is on the disk to be measured. Raw and store take turns of one call each, and a row has the best of `ROUNDS`
turns, which is what quiet neighbours leave, and the median CPU of all threads, which neighbours change less.
Writes to the disk have the checksum that the host tier computed, as in the tiers; every read computes it.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult
from penstock_kv.transfer.storage.disk_store import THREADS_PER_FILE, DiskStore
from penstock_kv.transfer.storage.host_slab import HostSlab
from penstock_kv.transfer.storage.slab_file import aligned

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
BATCH = 64 << 20
"""Bytes of one call: the blocks of one offload or one prompt."""
ROUNDS = 25


async def timed(call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return a call's seconds, and the CPU of the process meanwhile."""
    begin, cpu = time.perf_counter(), time.process_time()
    await call()
    return time.perf_counter() - begin, time.process_time() - cpu


async def compare(
    name: str, size: int, raw: Callable[[], Awaitable[object]], store: Callable[[], Awaitable[object]]
) -> None:
    """Print one row."""
    await raw()
    await store()
    pairs = [(await timed(raw), await timed(store)) for _ in range(ROUNDS)]
    raws, stores = zip(*pairs, strict=True)
    speeds = [BATCH / min(seconds for seconds, _ in column) / 1e9 for column in (raws, stores)]
    cpu = [statistics.median(cpu for _, cpu in column) / BATCH * 2**30 * 1000 for column in (raws, stores)]
    print(
        f"| {name} | {size >> 10} KiB | {speeds[0]:.2f} | {speeds[1]:.2f} | {speeds[1] / speeds[0]:.0%} "
        f"| {cpu[0]:.0f} | {cpu[1]:.0f} |",
        flush=True,
    )


async def disk(folder: Path, size: int, payload: bytes) -> None:
    count = BATCH // size
    slab = HostSlab(size, count)
    buffers = [slab.view(slot) for slot in range(count)]
    for buffer in buffers:
        buffer[:] = payload[:size]
    store = DiskStore([folder], size, count)
    blocks = [
        BlockIo(slot, b"%020d" % slot, 1, buffer, checksum=xxh3_64_intdigest(buffer))
        for slot, buffer in enumerate(buffers)
    ]
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, BATCH)
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(THREADS_PER_FILE)

    def share(first: int, call: Callable[..., int]) -> None:
        for slot in range(first, count, THREADS_PER_FILE):
            assert call(fd, [buffers[slot]], slot * size) == size

    async def raw(call: Callable[..., int]) -> None:
        await asyncio.gather(*(loop.run_in_executor(pool, share, each, call) for each in range(THREADS_PER_FILE)))

    async def right(call: Awaitable[list[BlockResult]]) -> None:
        assert {result.outcome for result in await call} == {"ok"}

    await compare("disk write", size, lambda: raw(os.pwritev), lambda: right(store.write(blocks, 60)))
    await compare("disk read", size, lambda: raw(os.preadv), lambda: right(store.read(blocks, 60)))
    pool.shutdown()
    os.close(fd)
    await store.close()
    await slab.close()


async def host(size: int, payload: bytes) -> None:
    count = BATCH // size
    slab = HostSlab(size, count)
    memory = aligned(BATCH)
    memory[:] = payload * (BATCH // len(payload))
    source, target = np.frombuffer(memory, np.uint8), np.frombuffer(aligned(BATCH), np.uint8)
    blocks = [BlockIo(slot, b"%020d" % slot, 1, memory[slot * size : (slot + 1) * size]) for slot in range(count)]

    async def raw() -> None:
        target[:] = source

    async def put() -> None:
        assert all(slab.put(block).outcome == "ok" for block in blocks)

    async def get() -> None:
        assert all(slab.get(block).outcome == "ok" for block in blocks)

    async def both() -> None:
        assert all(result.outcome == "ok" for result in await slab.read(blocks, 60))

    await compare("host put", size, raw, put)
    await compare("host get, checked", size, raw, get)
    await compare("host read, 2 threads", size, raw, both)
    await slab.close()


async def main(folder: Path) -> None:
    payload = os.urandom(max(SIZES))
    load = os.getloadavg()[0]
    print(f"{BATCH >> 20} MiB a call, {THREADS_PER_FILE} threads, best of {ROUNDS}; load {load:.1f}\n")
    print("| what | block | raw GB/s | store GB/s | ratio | raw CPU ms/GiB | store CPU ms/GiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            await disk(Path(place), size, payload)
    for size in SIZES:
        await host(size, payload)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())))
