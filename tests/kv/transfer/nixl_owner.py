"""A process with one NIXL agent and one region, for the test between processes: it prints its metadata."""

import asyncio
import sys

import numpy as np

from penstock_kv.transfer.backends.nixl_backend import NixlBackend
from penstock_kv.transfer.transfer_agent import TransferAgent


async def main(epoch: int, size: int) -> None:
    async with TransferAgent("owner", [NixlBackend()], epoch=epoch) as agent:
        agent.register_memory(np.full(size, epoch, np.uint8), label="kv")
        print(agent.metadata().hex(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
