"""The contract suite of transfers over `NixlFileBackend`, the real package on files of this host."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_kv.transfer.backends.nixl_agent import NixlAgent
from penstock_kv.transfer.backends.nixl_file_backend import NixlFileBackend
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_status import TransferState
from tests.kv.transfer.memory_harness import FolderHarness
from tests.kv.transfer.nixl_setup import needs_nixl
from tests.kv.transfer.transfer_contract import *  # noqa: F403 - the suite


class NixlFileHarness(FolderHarness):
    """Memory and files of one agent."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(NixlFileBackend, folder, patch)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        gate, move = asyncio.Event(), NixlAgent.move

        async def wait_and_move(agent: NixlAgent, *arguments: Any) -> None:
            await gate.wait()
            await move(agent, *arguments)

        with self._patch.context() as patch:
            patch.setattr(NixlAgent, "move", wait_and_move)
            try:
                yield
            finally:
                gate.set()


@pytest.fixture
async def transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NixlFileHarness]:
    needs_nixl()
    harness = NixlFileHarness(tmp_path, monkeypatch)
    yield harness
    await harness.close()


async def test_a_file_that_ends_early_fails_the_descriptors_behind_its_end(tmp_path: Path) -> None:
    needs_nixl()
    async with TransferAgent("a", [NixlFileBackend()]) as agent:
        file = agent.register_file(tmp_path / "slab", size=16384)
        memory = agent.register_memory(np.zeros(16384, np.uint8))
        handle = agent.prepare("read", memory.blocks(range(4), 4096), file.blocks(range(4), 4096), "a")
        with (tmp_path / "slab").open("r+b") as slab:
            slab.truncate(10000)
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert [result.status.name for result in handle.results()] == ["SUCCESS", "SUCCESS", "BACKEND", "BACKEND"]
