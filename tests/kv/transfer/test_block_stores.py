"""Every block store keeps the contract."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_kv.transfer.storage.block_store import BlockStore
from penstock_kv.transfer.storage.disk_store import DiskStore
from penstock_kv.transfer.storage.host_slab import HostSlab
from penstock_kv.transfer.storage.object_store import ObjectStore
from penstock_kv.transfer.storage.record_header import SECTOR, SIZE
from tests.kv.transfer.block_store_contract import *  # noqa: F403
from tests.kv.transfer.block_store_contract import SLOTS, BlockStoreHarness
from tests.kv.transfer.object_servers import BUCKET, azure_server, s3_server

PREFIXES = itertools.count()


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


class ObjectHarness:
    survives = True

    def __init__(self, block_bytes: int, scheme: str, options: dict[str, str]) -> None:
        self.block_bytes = block_bytes
        self.url = f"{scheme}://{BUCKET}/prefix-{next(PREFIXES)}"
        self.options = options

    async def open(self) -> BlockStore:
        return ObjectStore(self.url, self.block_bytes, SLOTS, options=self.options)

    async def flip(self, store: BlockStore, slot: int, at: int) -> None:
        import obstore
        from obstore.store import from_url

        client = from_url(self.url, client_options={"allow_http": True}, **self.options)
        (record,) = [each for batch in obstore.list(client) for each in batch if name_of(each["path"], slot)]
        path = record["path"].rpartition("/")[2]
        raw = bytearray(obstore.get(client, path).bytes())
        raw[SIZE + at] ^= 1
        obstore.put(client, path, bytes(raw))


def name_of(path: str, slot: int) -> bool:
    """Whether an object is that of a slot, as the suite's `written` names blocks."""
    return path.rpartition("/")[2].startswith((b"key-%d" % slot).hex() + ".")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("obstore")
    with s3_server(tmp_path_factory.mktemp("s3")) as (options, _):
        yield options


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("obstore")
    with azure_server(tmp_path_factory.mktemp("azure")) as options:
        yield options


@pytest.fixture(params=["host", "host-odd", "disk", "disk-odd", "s3", "azure"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStoreHarness:
    kind, _, odd = request.param.partition("-")
    size = 5000 if odd else 16384
    match kind:
        case "host":
            return HostHarness(size)
        case "disk":
            return DiskHarness(size, [tmp_path / "a", tmp_path / "b"])
        case "s3":
            return ObjectHarness(size, "s3", request.getfixturevalue("s3"))
    return ObjectHarness(size, "az", request.getfixturevalue("azure"))
