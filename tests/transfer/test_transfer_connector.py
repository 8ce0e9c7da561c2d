"""Operations of the connector: one side offers memory, the other reads or writes it, both wait."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from penstock.transfer.backends.memcpy_backend import MemcpyBackend
from penstock.transfer.transfer_agent import TransferAgent
from penstock.transfer.transfer_connector import RdmaMetadata, TransferConnector
from penstock.transfer.transfer_status import TransferFailed, TransferRefused, TransferState, TransferStatus


@pytest.fixture
async def connectors() -> AsyncIterator[tuple[TransferConnector, TransferConnector]]:
    async with (
        TransferAgent("prefill", [MemcpyBackend()]) as prefill,
        TransferAgent("decode", [MemcpyBackend()]) as decode,
    ):
        yield TransferConnector(prefill), TransferConnector(decode)


Connectors = tuple[TransferConnector, TransferConnector]


async def test_what_is_offered_for_reading_is_read(connectors: Connectors) -> None:
    prefill, decode = connectors
    kv, target = np.arange(3000, dtype=np.float32), np.zeros(3000, np.float32)
    async with await prefill.create_readable([kv]) as readable:
        sent = readable.metadata().to_json()
        async with await decode.begin_read(RdmaMetadata.from_json(sent), [target]) as read:
            await read.wait_for_completion()
            assert read.status is TransferState.DONE
        await readable.wait_for_completion()
        assert readable.status is TransferState.DONE
    assert (target == kv).all()
    assert not prefill.agent.regions and not decode.agent.regions, "each operation took its buffers back"


async def test_what_is_offered_for_writing_is_written_by_several_descriptors(connectors: Connectors) -> None:
    prefill, decode = connectors
    rows = decode.agent.register_memory(np.zeros(4096, np.uint8))
    source = prefill.agent.register_memory(np.full(4096, 7, np.uint8))
    async with await decode.create_writable(rows.blocks([0, 2], 1024)) as writable:
        async with await prefill.begin_write(writable.metadata(), source.blocks([1, 3], 1024)) as write:
            await write.wait_for_completion()
        await writable.wait_for_completion()
    assert rows.bytes_of().reshape(4, 1024).max(axis=1).tolist() == [7, 0, 7, 0]
    assert len(decode.agent.regions) == 1, "a region that was there before stays"


async def test_operations_complete_on_their_own_notifications_only(connectors: Connectors) -> None:
    prefill, decode = connectors
    offered = [await prefill.create_readable([np.full(64, number, np.uint8)]) for number in range(3)]
    await decode.agent.close()  # the second one's peer goes
    async with TransferAgent("decode", [MemcpyBackend()]) as again:
        decode = TransferConnector(again)
        target = np.zeros(64, np.uint8)
        async with await decode.begin_read(offered[2].metadata(), [target]) as read:
            await read.wait_for_completion()
        await offered[2].wait_for_completion()
        assert [each.status for each in offered] == [TransferState.POSTED, TransferState.POSTED, TransferState.DONE]
        assert (target == 2).all()
    for each in offered:
        await each.release()


async def test_a_peer_that_never_comes_ends_at_the_deadline(connectors: Connectors) -> None:
    prefill, _ = connectors
    async with await prefill.create_writable([bytearray(8)], deadline=0.01) as writable:
        with pytest.raises(TransferFailed, match="did not complete"):
            await writable.wait_for_completion()
        assert writable.status is TransferState.FAILED
    cancelled = await prefill.create_readable([bytearray(8)])
    waiting = asyncio.create_task(cancelled.wait_for_completion())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(TransferFailed, match="cancelled"):
        await waiting
    await cancelled.release()


async def test_what_is_wrong_is_refused_before_anything_moves_and_leaves_nothing_registered(
    connectors: Connectors,
) -> None:
    prefill, decode = connectors
    readable = await prefill.create_readable([bytearray(64)])
    metadata = readable.metadata()
    with pytest.raises(TransferRefused, match="readable"):
        await decode.begin_write(metadata, [bytearray(64)])
    with pytest.raises(TransferRefused, match="bytes here"):
        await decode.begin_read(metadata, [bytearray(32)])
    with pytest.raises(TransferRefused, match="read-only"):
        await decode.begin_read(metadata, [b"x" * 64])
    with pytest.raises(TransferRefused, match="deadline"):
        await decode.begin_read(metadata, [bytearray(64)], deadline=0)
    with pytest.raises(TypeError):
        await decode.begin_read(metadata, [bytearray(8), 3])
    with pytest.raises(TransferRefused, match="read-only"):
        await decode.create_writable([b"constant"])
    with pytest.raises(TransferRefused, match="no descriptors"):
        await decode.create_readable([])
    for text in ("{}", "", '{"agent": 1}'):
        with pytest.raises(TransferRefused) as refused:
            RdmaMetadata.from_json(text)
        assert refused.value.status is TransferStatus.INVALID
    assert not decode.agent.regions
    assert readable.status is TransferState.POSTED
    await readable.release()


async def test_an_offer_of_before_a_restart_is_refused(connectors: Connectors) -> None:
    prefill, decode = connectors
    old = (await prefill.create_readable([bytearray(64)])).metadata()
    await prefill.agent.close()
    async with TransferAgent("prefill", [MemcpyBackend()]) as again:
        offer = await TransferConnector(again).create_readable([bytearray(b"y" * 64)])
        target = bytearray(64)
        async with await decode.begin_read(offer.metadata(), [target]) as read:
            await read.wait_for_completion()
        assert target == b"y" * 64
        with pytest.raises(TransferRefused, match="restarted"):
            await decode.begin_read(old, [target])
        await offer.release()
