"""Ways through the memory of one host: one large copy, and the library's memcpy and shared memory."""

import mmap
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
from child import Child
from sizes import TOTAL

from penstock_kv.transfer.backends.memcpy_backend import MemcpyBackend
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.descriptors import Descriptor
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_status import TransferState

Ways = dict[str, dict[str, Callable[[int], Awaitable[float]]]]
"""Per direction, ways by name; the first is the raw limit."""


async def transfer(agent: TransferAgent, direction: str, local: int, remote: int, block: int) -> float:
    """Time one posted transfer of all blocks; preparing it checks its descriptors once, and is not timed."""
    here, there = [[Descriptor(region, at, block) for at in range(0, TOTAL, block)] for region in (local, remote)]
    handle = agent.prepare(direction, here, there, "owner", deadline=120)
    start = time.perf_counter()
    handle.post()
    state = await handle.wait()
    seconds = time.perf_counter() - start
    if state is not TransferState.DONE:
        handle.raise_for_failure()
    await handle.settle()
    return seconds


def page_memory(value: int) -> np.ndarray:
    """Return `TOTAL` bytes that begin at a page: a NumPy array's own do not, which costs copies half their speed."""
    memory = np.frombuffer(mmap.mmap(-1, TOTAL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = value
    return memory


def one_copy(target: np.ndarray, source: np.ndarray) -> Callable[[int], Awaitable[float]]:
    """One copy of everything, whatever the block: the limit."""

    async def copy(_: int) -> float:
        start = time.perf_counter()
        target[:] = source
        return time.perf_counter() - start

    return copy


def library(agent: TransferAgent, direction: str, local: int, remote: int) -> Callable[[int], Awaitable[float]]:
    """The library's transfer of all blocks."""

    async def move(block: int) -> float:
        return await transfer(agent, direction, local, remote, block)

    return move


@asynccontextmanager
async def memcpy() -> AsyncIterator[Ways]:
    """Two agents of one process."""
    async with TransferAgent("reader", [MemcpyBackend()]) as reader, TransferAgent("owner", [MemcpyBackend()]) as owner:
        mine, theirs = page_memory(1), page_memory(2)
        local, remote = reader.register_memory(mine), owner.register_memory(theirs)
        reader.add_remote(owner.metadata())
        yield {
            "read": {"one copy": one_copy(mine, theirs), "memcpy": library(reader, "read", local.id, remote.id)},
            "write": {"one copy": one_copy(theirs, mine), "memcpy": library(reader, "write", local.id, remote.id)},
        }


@asynccontextmanager
async def shared() -> AsyncIterator[Ways]:
    """Two processes; the other one shares its memory."""
    child = Child(sys.executable, "owner.py", "shm")
    async with TransferAgent("reader", [ShmBackend()]) as reader:
        mine = page_memory(1)
        local = reader.register_memory(mine)
        (remote,) = reader.add_remote(bytes.fromhex(child.hello["metadata"])).regions
        own = SharedMemory.create(TOTAL)
        own.array[:] = 3
        yield {
            "read": {"one copy": one_copy(mine, own.array), "shm": library(reader, "read", local.id, remote)},
            "write": {"one copy": one_copy(own.array, mine), "shm": library(reader, "write", local.id, remote)},
        }
    child.close()
