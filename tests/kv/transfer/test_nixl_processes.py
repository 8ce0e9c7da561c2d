"""NIXL between two processes, and a peer that is killed and started again."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock_kv.transfer.backends.nixl_backend import NixlBackend
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_status import TransferState, TransferStatus
from tests.kv.transfer.nixl_setup import needs_nixl

SIZE = 1 << 20
ROOT = Path(__file__).parents[3]


async def start_owner(epoch: int) -> tuple[asyncio.subprocess.Process, bytes]:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kv.transfer.nixl_owner", str(epoch), str(SIZE),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT, limit=1 << 20,
    )  # fmt: skip
    assert owner.stdout is not None
    while True:
        line = await owner.stdout.readline()
        assert line, "the owner ended before it said where it is"
        try:
            return owner, bytes.fromhex(line.decode())
        except ValueError:
            continue  # a line of NIXL's own log


@pytest.mark.live
async def test_a_peer_that_was_killed_and_started_again_is_read_after_its_new_metadata() -> None:
    needs_nixl()
    async with TransferAgent("reader", [NixlBackend()]) as agent:
        memory = agent.register_memory(np.zeros(SIZE, np.uint8))
        owner, metadata = await start_owner(1)
        peer = agent.add_remote(metadata)
        (region,) = peer.regions
        parts = (
            memory.blocks(range(16), 65536),
            [type(memory.descriptor())(region, at * 65536, 65536) for at in range(16)],
        )
        handle = agent.prepare("read", *parts, "owner")
        handle.post()
        assert await handle.wait() is TransferState.DONE
        assert set(memory.bytes_of()) == {1}

        owner.kill()
        await owner.wait()
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert {result.status for result in handle.results()} == {TransferStatus.DISCONNECTED}

        owner, metadata = await start_owner(2)
        agent.add_remote(metadata)
        handle = agent.prepare("read", *parts, "owner")
        handle.post()
        assert await handle.wait() is TransferState.DONE
        assert set(memory.bytes_of()) == {2}
        await owner.communicate(b"\n")
