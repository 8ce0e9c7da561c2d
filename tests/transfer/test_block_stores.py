"""Every block store keeps the contract."""

from pathlib import Path

import pytest

from penstock.testing.block_store_contract import *  # noqa: F403
from penstock.testing.block_store_contract import SLOTS, BlockStoreHarness
from penstock.transfer.storage.block_store import BlockStore
from penstock.transfer.storage.disk_store import DiskStore
from penstock.transfer.storage.host_slab import HostSlab
from penstock.transfer.storage.record_header import SECTOR


class HostHarness:
    survives = False

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    async def open(self) -> BlockStore:
        return HostSlab(self.block_bytes, SLOTS)

    async def flip(self, store: BlockStore, slot: int, at: int) -> None:
        assert isinstance(store, HostSlab)
        store.view(slot)[at] ^= 1


class DiskHarness:
    survives = True

    def __init__(self, block_bytes: int, folders: list[Path]) -> None:
        self.block_bytes = block_bytes
        self.folders = folders

    async def open(self) -> BlockStore:
        return DiskStore(self.folders, self.block_bytes, SLOTS)

    async def flip(self, store: BlockStore, slot: int, at: int) -> None:
        flip_on_disk(store, slot, SECTOR + at)


def flip_on_disk(store: BlockStore, slot: int, at: int) -> None:
    """Change one bit of a slot's record; ``at`` counts from its header's first byte on."""
    assert isinstance(store, DiskStore)
    file, index = store.place(slot)
    with file.path.open("r+b") as raw:
        raw.seek(file.offset(index) + at)
        byte = raw.read(1)[0]
        raw.seek(-1, 1)
        raw.write(bytes([byte ^ 1]))


@pytest.fixture(params=["host", "host-odd", "disk", "disk-odd"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStoreHarness:
    kind, _, odd = request.param.partition("-")
    size = 5000 if odd else 16384
    if kind == "host":
        return HostHarness(size)
    return DiskHarness(size, [tmp_path / "a", tmp_path / "b"])
