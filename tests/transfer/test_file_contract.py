"""The contract suite of transfers over `FileBackend`, direct and through the page cache, and files that end early."""

import contextlib
import mmap
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.transfer.backends import file_backend
from penstock.transfer.backends.file_backend import FileBackend
from penstock.transfer.descriptors import MemoryRegion, TransferPiece
from penstock.transfer.transfer_agent import TransferAgent
from penstock.transfer.transfer_backend import Direction
from penstock.transfer.transfer_status import TransferState, TransferStatus
from tests.transfer.memory_harness import FolderHarness
from tests.transfer.transfer_contract import *  # noqa: F403 - the suite


class FileHarness(FolderHarness):
    """Memory that is aligned to pages, and files."""

    def __init__(self, folder: Path, direct: bool, patch: pytest.MonkeyPatch) -> None:
        super().__init__(FileBackend, folder, patch, direct=direct)

    async def local_region(self, agent: TransferAgent, size: int) -> MemoryRegion:
        return agent.register_memory(mmap.mmap(-1, size))

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        gate, move = threading.Event(), file_backend.move_piece

        def wait_and_move(direction: Direction, piece: TransferPiece, file: MemoryRegion) -> None:
            gate.wait()
            move(direction, piece, file)

        with self._patch.context() as patch:
            patch.setattr(file_backend, "move_piece", wait_and_move)
            try:
                yield
            finally:
                gate.set()


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
async def transfers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FileHarness]:
    harness = FileHarness(tmp_path, request.param, monkeypatch)
    yield harness
    await harness.close()


async def test_a_file_that_ends_early_fails_the_descriptors_behind_its_end(tmp_path: Path) -> None:
    async with TransferAgent("a", [FileBackend()]) as agent:
        file = agent.register_file(tmp_path / "slab", size=16384)
        memory = agent.register_memory(np.zeros(16384, np.uint8))
        handle = agent.prepare("read", memory.blocks(range(4), 4096), file.blocks(range(4), 4096), "a")
        with (tmp_path / "slab").open("r+b") as slab:
            slab.truncate(10000)
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert [result.status.name for result in handle.results()] == ["SUCCESS", "SUCCESS", "NOT_FOUND", "NOT_FOUND"]
        assert "ends at byte 10000" in handle.results()[2].cause


async def test_an_error_of_the_disk_is_the_cause_of_its_descriptor() -> None:
    async with TransferAgent("a", [FileBackend()]) as agent:
        file = os.open("/dev/full", os.O_WRONLY)
        full = agent._register("file", 4096, "full", True, path="/dev/full", descriptor_fd=file)
        memory = agent.register_memory(np.zeros(4096, np.uint8))
        handle = agent.prepare("write", [memory.descriptor()], [full.descriptor()], "a")
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert handle.results()[0].status is TransferStatus.BACKEND
        assert "No space left" in handle.results()[0].cause
