"""The contract suite of transfers over `MemcpyBackend`."""

from collections.abc import AsyncIterator

import pytest

from penstock.testing.transfer_contract import *  # noqa: F403 - the suite
from penstock.transfer.backends.memcpy_backend import MemcpyBackend
from tests.transfer.memory_harness import MemoryHarness


@pytest.fixture
async def transfers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryHarness]:
    harness = MemoryHarness(MemcpyBackend, monkeypatch)
    yield harness
    await harness.close()
