"""The contract suite of transfers over `MemcpyBackend`."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock_kv.transfer.backends.memcpy_backend import MemcpyBackend
from tests.kv.transfer.memory_harness import MemoryHarness
from tests.kv.transfer.transfer_contract import *  # noqa: F403 - the suite
from tests.kv.transfer.transfer_contract import pair_of


@pytest.fixture
async def transfers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryHarness]:
    harness = MemoryHarness(MemcpyBackend, monkeypatch)
    yield harness
    await harness.close()


async def test_memory_is_busy_as_long_as_a_cancelled_copy_has_a_thread(transfers: MemoryHarness) -> None:
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("read", *pair.parts(), pair.peer)
        with transfers.stalled():
            handle.post()
            await asyncio.sleep(0.01)
            for _ in range(3):
                handle.cancel()
                await asyncio.sleep(0.01)
                assert handle.busy and pair.local.pins and pair.remote.pins
        await asyncio.wait_for(handle.settle(), 30.0)
        assert not (handle.busy or pair.local.pins or pair.remote.pins)
