"""Harnesses of the backends that move bytes between memory of one host, for the contract suite of transfers."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_kv.transfer.backends import byte_copies
from penstock_kv.transfer.descriptors import MemoryRegion
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_backend import TransferBackend
from tests.kv.transfer.transfer_contract import fill


class MemoryHarness:
    """Agents of this process with memory; ``shared``: the target's could be mapped by other processes."""

    def __init__(
        self, backend: Callable[[], TransferBackend], patch: pytest.MonkeyPatch, *, shared: bool = False
    ) -> None:
        self._backend = backend
        self._shared = shared
        self._patch = patch
        self._agents: list[TransferAgent] = []
        self.capabilities = backend().capabilities

    async def agent(self, name: str, epoch: int) -> TransferAgent:
        agent = TransferAgent(name, [self._backend()], epoch=epoch)
        await agent.start()
        self._agents.append(agent)
        return agent

    async def local_region(self, agent: TransferAgent, size: int) -> MemoryRegion:
        return agent.register_memory(np.zeros(size, np.uint8), label="local")

    async def target_region(self, agent: TransferAgent, size: int, *, writable: bool = True) -> MemoryRegion:
        if self._shared:
            return agent.register_shared(SharedMemory.create(size), label="target", writable=writable)
        return agent.register_memory(np.zeros(size, np.uint8), label="target", writable=writable)

    async def put(self, region: MemoryRegion, data: bytes) -> None:
        fill(region.bytes_of(), data)

    async def get(self, region: MemoryRegion) -> bytes:
        return region.bytes_of().tobytes()

    async def lose(self, agent: TransferAgent, region: MemoryRegion) -> None:
        agent.deregister(region)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        gate = threading.Event()
        copy_now = byte_copies.copy_now

        def wait_and_copy(*arguments: Any) -> None:
            gate.wait()
            copy_now(*arguments)

        with self._patch.context() as patch:
            patch.setattr(byte_copies, "copy_now", wait_and_copy)
            patch.setattr(byte_copies, "INLINE_BYTES", 0)  # in a thread: the loop must go on
            try:
                yield
            finally:
                gate.set()

    async def close(self) -> None:
        for agent in self._agents:
            await agent.close()


class FolderHarness(MemoryHarness):
    """Memory, and files of one folder."""

    def __init__(self, backend: Callable[[], TransferBackend], folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(backend, patch)
        self._folder, self._count = folder, 0

    async def target_region(self, agent: TransferAgent, size: int, *, writable: bool = True) -> MemoryRegion:
        self._count += 1
        path = self._folder / str(self._count)
        path.write_bytes(bytes(size))
        return agent.register_file(path, writable=writable)

    async def put(self, region: MemoryRegion, data: bytes) -> None:
        if region.kind == "file":
            self._write(Path(region.path), data)
        else:
            await super().put(region, data)

    async def get(self, region: MemoryRegion) -> bytes:
        return self._read(Path(region.path)) if region.kind == "file" else await super().get(region)

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        path.write_bytes(data)

    @staticmethod
    def _read(path: Path) -> bytes:
        return path.read_bytes()
