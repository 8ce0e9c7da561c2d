"""Ways between the memory of a GPU and its host's: one large pinned copy, and the library's memcpy."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from memory import Ways, library, page_memory
from sizes import TOTAL

from penstock_kv.transfer.backends.memcpy_backend import MemcpyBackend
from penstock_kv.transfer.transfer_agent import TransferAgent


def one_copy(torch: Any, target: Any, source: Any) -> Callable[[int], Awaitable[float]]:
    """One copy of everything, whatever the block: the limit of the bus."""

    async def copy(_: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return copy


@asynccontextmanager
async def gpu() -> AsyncIterator[Ways]:
    """Host memory of one agent, and the GPU's of another one of the same process; needs torch and a GPU."""
    import torch

    async with TransferAgent("reader", [MemcpyBackend()]) as reader, TransferAgent("owner", [MemcpyBackend()]) as owner:
        pinned, plain = page_memory(1), page_memory(2)
        kv = torch.randint(0, 256, (TOTAL,), dtype=torch.uint8, device="cuda")
        other = torch.zeros_like(kv)
        local = reader.register_memory(pinned, pinned=True)
        pageable, device = reader.register_memory(plain), reader.register_tensor(other)
        remote = owner.register_tensor(kv)
        reader.add_remote(owner.metadata())
        host = torch.from_numpy(pinned)

        def ways(direction: str, *limit: Any) -> dict[str, Callable[[int], Awaitable[float]]]:
            return {
                "one copy": one_copy(torch, *limit),
                "pinned": library(reader, direction, local.id, remote.id),
                "pageable": library(reader, direction, pageable.id, remote.id),
                "GPU to GPU": library(reader, direction, device.id, remote.id),
            }

        yield {"read": ways("read", host, kv), "write": ways("write", kv, host)}
