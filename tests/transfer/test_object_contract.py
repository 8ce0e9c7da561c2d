"""The contract suite of transfers over `ObjectBackend`, on a real S3 server of this host."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.transfer.backends.object_backend import ObjectBackend
from penstock.transfer.descriptors import MemoryRegion
from penstock.transfer.transfer_agent import TransferAgent
from penstock.transfer.transfer_status import TransferState, TransferStatus
from tests.transfer.memory_harness import MemoryHarness
from tests.transfer.object_servers import BUCKET, s3_server
from tests.transfer.transfer_contract import *  # noqa: F403 - the suite

obstore = pytest.importorskip("obstore")
NUMBERS = itertools.count()


class ObjectHarness(MemoryHarness):
    """Memory and objects of one agent."""

    def __init__(self, options: dict[str, str], patch: pytest.MonkeyPatch) -> None:
        self.url = f"s3://{BUCKET}/transfers"
        self._options = options
        super().__init__(lambda: ObjectBackend(self.url, options), patch)
        self._client = obstore.store.S3Store.from_url(self.url, client_options={"allow_http": True}, **options)

    async def target_region(self, agent: TransferAgent, size: int, *, writable: bool = True) -> MemoryRegion:
        region = agent.register_object(f"object-{next(NUMBERS)}", size, writable=writable)
        await self.put(region, bytes(size))
        return region

    async def put(self, region: MemoryRegion, data: bytes) -> None:
        if region.kind == "object":
            await obstore.put_async(self._client, region.key, data)
        else:
            await super().put(region, data)

    async def get(self, region: MemoryRegion) -> bytes:
        if region.kind == "object":
            return bytes(await (await obstore.get_async(self._client, region.key)).bytes_async())
        return await super().get(region)

    async def lose_object(self, region: MemoryRegion) -> None:
        await obstore.delete_async(self._client, region.key)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        gate, move = asyncio.Event(), ObjectBackend._move_object

        async def wait_and_move(backend: ObjectBackend, *arguments: Any) -> None:
            await gate.wait()
            await move(backend, *arguments)

        with self._patch.context() as patch:
            patch.setattr(ObjectBackend, "_move_object", wait_and_move)
            try:
                yield
            finally:
                gate.set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as (options, _):
        yield options


@pytest.fixture
async def transfers(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectHarness]:
    harness = ObjectHarness(server, monkeypatch)
    yield harness
    await harness.close()


async def test_an_object_that_is_gone_or_too_short_is_named(transfers: ObjectHarness) -> None:
    agent = await transfers.agent("a", 1)
    memory = agent.register_memory(np.zeros(8192, np.uint8))
    gone, short = [await transfers.target_region(agent, 4096) for _ in range(2)]
    handle = agent.prepare("read", memory.blocks(range(2), 4096), [gone.descriptor(), short.descriptor()], "a")
    await transfers.lose_object(gone)
    await transfers.put(short, b"short")
    handle.post()
    assert await handle.wait() is TransferState.FAILED
    assert all(result.status is not TransferStatus.SUCCESS for result in handle.results())
    assert handle.results()[0].status is TransferStatus.NOT_FOUND


async def test_a_new_object_is_made_by_a_transfer_that_covers_it(transfers: ObjectHarness) -> None:
    agent = await transfers.agent("a", 1)
    memory = agent.register_memory(np.arange(4096, dtype=np.uint8))
    made = agent.register_object("new", 4096)
    parts = memory.blocks(range(2), 2048), made.blocks([1, 0], 2048)
    half = agent.prepare("write", parts[0][:1], parts[1][:1], "a")
    half.post()
    assert await half.wait() is TransferState.FAILED
    assert half.results()[0].status is TransferStatus.NOT_FOUND
    whole = agent.prepare("write", *parts, "a")
    whole.post()
    assert await whole.wait() is TransferState.DONE
    data = memory.bytes_of().tobytes()
    assert await transfers.get(made) == data[2048:] + data[:2048]
