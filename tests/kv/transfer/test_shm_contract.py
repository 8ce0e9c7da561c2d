"""The contract suite of transfers over `ShmBackend`, and a peer in another process."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import uvloop
from msgspec.structs import replace

from penstock_kv.transfer.agent_metadata import decode_metadata
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.descriptors import Descriptor
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_status import TransferRefused, TransferState, TransferStatus
from tests.kv.transfer.memory_harness import MemoryHarness
from tests.kv.transfer.transfer_contract import *  # noqa: F403 - the suite
from tests.kv.transfer.transfer_contract import pair_of

SIZE = 8 << 20
PEER = """
import asyncio, sys
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.descriptors import Descriptor
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_agent import TransferAgent

async def main(epoch, size):
    async with TransferAgent("child", [ShmBackend()], epoch=epoch) as agent:
        region = agent.register_shared(SharedMemory.create(size))
        print(agent.metadata().hex(), flush=True)
        while True:
            for notification in await agent.wait_for_notifications():
                print(notification.payload.decode(), int(region.array.astype("u8").sum()), flush=True)

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.fixture
async def transfers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryHarness]:
    harness = MemoryHarness(ShmBackend, monkeypatch, shared=True)
    yield harness
    await harness.close()


@contextlib.asynccontextmanager
async def child(epoch: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytes]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, str(epoch), str(SIZE), stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    assert process.stdout is not None
    try:
        yield process, bytes.fromhex((await process.stdout.readline()).decode())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_another_process_gets_bytes_and_notification_and_its_death_is_noticed() -> None:
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    async with TransferAgent("parent", [ShmBackend()], epoch=1) as agent:
        region = agent.register_memory(data)
        async with child(1) as (process, metadata):
            agent.add_remote(metadata)
            (theirs,) = agent.remote("child").regions
            there = [Descriptor(theirs, at, SIZE // 32) for at in range(0, SIZE, SIZE // 32)]
            parts = region.blocks(range(32), SIZE // 32), there
            write = agent.prepare("write", *parts, "child", notification=b"sum")
            write.post()
            assert await write.wait() is TransferState.DONE
            assert process.stdout is not None
            assert (await process.stdout.readline()).split() == [b"sum", str(int(data.astype("u8").sum())).encode()]

            back = agent.register_memory(np.zeros(SIZE, np.uint8))
            read = agent.prepare("read", back.blocks(range(32), SIZE // 32), parts[1], "child")
            read.post()
            assert await read.wait() is TransferState.DONE
            assert (back.bytes_of() == data).all()

            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            write.post()
            assert await write.wait() is TransferState.FAILED
            assert {result.status for result in write.results()} == {TransferStatus.DISCONNECTED}
        async with child(2) as (_, metadata):
            agent.add_remote(metadata)
            again = agent.prepare("write", *parts, "child")
            again.post()
            assert await again.wait() is TransferState.DONE


async def test_memory_of_a_file_in_dev_shm_is_shared_and_private_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(4096))
    async with TransferAgent("a", [ShmBackend()]) as a, TransferAgent("b", [ShmBackend()]) as b:
        rows = SharedMemory.open(path)
        shared, private = b.register_shared(rows), b.register_memory(bytearray(4096))
        mine = a.register_memory(b"x" * 4096)
        a.add_remote(b.metadata())
        handle = a.prepare("write", [mine.descriptor()], [shared.descriptor()], "b")
        handle.post()
        assert await handle.wait() is TransferState.DONE
        assert path.read_bytes() == b"x" * 4096
        with pytest.raises(TransferRefused, match="shared memory"):
            a.prepare("write", [mine.descriptor()], [private.descriptor()], "b")

        later = b.register_shared(SharedMemory.open(path))
        a.add_remote(b.metadata())
        path.unlink()
        path.write_bytes(bytes(4096))  # another file of the same name is not that memory
        handle = a.prepare("write", [mine.descriptor()], [later.descriptor()], "b")
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert "is not the memory of region" in handle.results()[0].cause
        assert path.read_bytes() == bytes(4096)


async def test_the_owner_keeps_a_region_while_a_peer_copies_and_gets_it_back_after(transfers: MemoryHarness) -> None:
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("read", *pair.parts(), pair.peer)
        with transfers.stalled():
            handle.post()
            async with asyncio.timeout(30.0):
                while not pair.remote.pins:
                    await asyncio.sleep(0.001)
            with pytest.raises(TransferRefused, match="may still touch"):
                pair.target.deregister(pair.remote)
            handle.cancel()
            assert pair.remote.pins, "the thread still copies"
        await handle.settle()
        async with asyncio.timeout(30.0):
            while pair.remote.pins:
                await asyncio.sleep(0.001)
        pair.target.deregister(pair.remote)


async def test_metadata_of_another_epoch_at_the_same_address_is_refused(transfers: MemoryHarness) -> None:
    async with pair_of(transfers) as pair:
        pair.origin.add_remote(replace(decode_metadata(pair.target.metadata()), epoch=2).encode())
        handle = pair.origin.prepare("read", *pair.parts(), pair.peer)
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert "before its restart" in handle.results()[0].cause


def test_it_runs_in_uvloop() -> None:
    async def main() -> None:
        async with TransferAgent("a", [ShmBackend()]) as a, TransferAgent("b", [ShmBackend()]) as b:
            mine, theirs = a.register_memory(b"x" * 4096), b.register_shared(SharedMemory.create(4096))
            a.add_remote(b.metadata())
            handle = a.prepare("write", [mine.descriptor()], [theirs.descriptor()], "b", notification=b"n")
            handle.post()
            assert await handle.wait() is TransferState.DONE
            assert theirs.bytes_of().tobytes() == b"x" * 4096
            assert (await asyncio.wait_for(b.wait_for_notifications(), 30.0))[0].payload == b"n"

    uvloop.run(main())
