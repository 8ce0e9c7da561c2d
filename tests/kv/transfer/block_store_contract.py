"""Contract suite of a `BlockStore`: what the tiers rely on, whatever it keeps its blocks in.

A test module imports all names and has a fixture ``stores``, a `BlockStoreHarness` over the store under test:

    from tests.kv.transfer.block_store_contract import *
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

import pytest

from penstock_kv.transfer.storage.block_store import BlockIo, BlockStore
from penstock_kv.transfer.storage.slab_file import aligned

PATIENCE = 30.0
"""Seconds of a deadline that only a broken store meets."""
SLOTS = 12
RANDOM_STEPS = 60


class BlockStoreHarness(Protocol):
    """One place with blocks in it; each handle on it is opened after the one before was closed."""

    survives: bool
    """Whether blocks outlive a handle."""
    block_bytes: int

    async def open(self) -> BlockStore:
        """Return a handle, of `SLOTS` slots."""
        ...

    async def flip(self, store: BlockStore, slot: int, at: int) -> None:
        """Change one bit of what is stored for a slot: ``at`` counts from the payload's first byte on."""
        ...


def block(slot: int, key: bytes, generation: int, payload: bytes, parent: bytes | None = None) -> BlockIo:
    """Return a call with a buffer of its own."""
    buffer = aligned(len(payload))
    buffer[:] = payload
    return BlockIo(slot, key, generation, buffer, parent)


def empty(of: BlockIo) -> BlockIo:
    """Return a read of what a write wrote, into zeros."""
    return of._replace(buffer=aligned(of.buffer.nbytes), checksum=None)


def payload_of(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


async def written(store: BlockStore, slots: Sequence[int], first: int = 0) -> list[BlockIo]:
    """Write blocks that differ, each the parent of the next one."""
    keys = [b"key-%d" % (first + slot) for slot in slots]
    blocks = [
        block(slot, key, 7 + slot, payload_of(first + slot, store.block_bytes), parent)
        for slot, key, parent in zip(slots, keys, [None, *keys], strict=False)
    ]
    assert {each.outcome for each in await store.write(blocks, PATIENCE)} == {"ok"}
    return blocks


async def outcomes(store: BlockStore, blocks: Sequence[BlockIo]) -> list[str]:
    return [result.outcome for result in await store.read(blocks, PATIENCE)]


async def test_a_block_comes_back_as_it_was(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    blocks = await written(store, range(SLOTS))
    reads = [empty(each) for each in reversed(blocks)]
    results = await store.read(reads, PATIENCE)
    assert [result.outcome for result in results] == ["ok"] * SLOTS
    assert [bytes(each.buffer) for each in reads] == [bytes(each.buffer) for each in reversed(blocks)]
    again = await store.write([each._replace(checksum=result.checksum) for each, result in zip(reads, results)], 30)
    assert [result.checksum for result in again] == [result.checksum for result in results]
    assert await outcomes(store, reads) == ["ok"] * SLOTS
    await store.close()


async def test_what_was_never_written_is_absent(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    assert store.records() == []
    assert await outcomes(store, [block(3, b"key", 0, bytes(store.block_bytes))]) == ["absent"]
    assert await store.read([], PATIENCE) == [] == await store.write([], PATIENCE)
    await store.close()
    await store.close()


async def test_another_generation_is_stale_and_another_key_is_corrupt(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    one, two = await written(store, [1, 2])
    wrong = [empty(one)._replace(generation=one.generation + 1), empty(one)._replace(key=two.key), empty(two)]
    assert await outcomes(store, wrong) == ["stale", "corrupt", "ok"]
    await store.close()


async def test_an_overwritten_block_is_never_read_again(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    (old,) = await written(store, [4])
    new = block(4, b"another", old.generation + 1, payload_of(99, store.block_bytes))
    assert [result.outcome for result in await store.write([new], PATIENCE)] == ["ok"]
    assert await outcomes(store, [empty(old), empty(new)]) == ["stale", "ok"]
    await store.close()


async def test_a_changed_byte_is_corrupt(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    blocks = await written(store, [0, 1, 2, 3])
    for slot, at in ((0, 0), (1, store.block_bytes // 2), (2, store.block_bytes - 1)):
        await stores.flip(store, slot, at)
    assert await outcomes(store, [empty(each) for each in blocks]) == ["corrupt"] * 3 + ["ok"]
    await store.close()


async def test_a_byte_that_changed_before_the_write_is_corrupt(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    (one,) = await written(store, [0])
    (read,) = await store.read([one], PATIENCE)
    one.buffer[5] ^= 1
    await store.write([one._replace(checksum=read.checksum)], PATIENCE)
    assert await outcomes(store, [empty(one)]) == ["corrupt"]
    await store.close()


async def test_after_the_deadline_a_result_is_late_and_the_store_goes_on(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    blocks = await written(store, [0, 1])
    results = await store.read([empty(each) for each in blocks], 0.0)
    assert [result.outcome for result in results] == ["late", "late"]
    late = await store.write([block(2, b"late", 1, payload_of(2, store.block_bytes))], 0.0)
    assert [result.outcome for result in late] == ["late"]
    async with asyncio.timeout(PATIENCE):
        while store.busy():
            await asyncio.sleep(0.001)
    reads = [empty(each) for each in blocks] + [block(2, b"late", 1, bytes(store.block_bytes))]
    assert await outcomes(store, reads) == ["ok", "ok", "absent"]
    await store.close()


async def test_a_forgotten_block_is_absent_until_its_slot_is_written(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    blocks = await written(store, range(4))
    store.forget([1, 3, 1])
    assert await outcomes(store, [empty(each) for each in blocks]) == ["ok", "absent", "ok", "absent"]
    store.forget([0])
    await written(store, [0, 1], first=50)
    assert await outcomes(store, [empty(each) for each in blocks[:2]]) == ["corrupt", "corrupt"]
    await store.close()


async def test_a_call_that_does_not_fit_is_a_failure_of_its_block(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    (right,) = await written(store, [0])
    odd = [block(0, b"key", 1, bytes(store.block_bytes // 2)), right._replace(slot=SLOTS), right._replace(slot=-1)]
    odd.append(right._replace(slot=1, key=bytes(200)))
    assert [result.outcome for result in await store.write([*odd, right], PATIENCE)] == ["failed"] * 4 + ["ok"]
    assert await outcomes(store, [*odd[:3], empty(right)]) == ["failed"] * 3 + ["ok"]
    await store.close()


async def test_memory_that_is_not_aligned_will_do(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    odd = memoryview(bytearray(payload_of(1, store.block_bytes + 1)))[1:]
    one = BlockIo(5, b"odd", 1, odd)
    target = memoryview(bytearray(store.block_bytes + 3))[3:]
    assert [result.outcome for result in await store.write([one], PATIENCE)] == ["ok"]
    assert await outcomes(store, [one._replace(buffer=target)]) == ["ok"]
    assert bytes(target) == bytes(odd)
    await store.close()


async def test_records_after_a_restart(stores: BlockStoreHarness) -> None:
    store = await stores.open()
    blocks = await written(store, [7, 0, 3, 5])
    store.forget([3])
    await store.close()
    for _ in range(2):
        store = await stores.open()
        expected = [each for each in blocks if each.slot != 3] if stores.survives else []
        by_slot = {record.slot: record for record in store.records()}
        assert sorted((record.key, record.generation, record.parent) for record in by_slot.values()) == sorted(
            (each.key, each.generation, each.parent) for each in expected
        )
        reads = [
            empty(each)._replace(slot=record.slot)
            for each in expected
            for record in store.records()
            if record.key == each.key
        ]
        assert await outcomes(store, reads) == ["ok"] * len(expected)
        assert [bytes(each.buffer) for each in reads] == [bytes(each.buffer) for each in expected]
        await store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_random_calls_against_a_dict(stores: BlockStoreHarness, seed: int) -> None:
    """A read is ok with the bytes that were written last, or it is a miss; and it is a miss only where it has to be."""
    rng = random.Random(seed)
    store = await stores.open()
    model: dict[int, BlockIo] = {}
    generation = 0
    for _ in range(RANDOM_STEPS):
        slots = rng.sample(range(SLOTS), rng.randint(1, 4))
        match rng.choice(["write", "write", "read", "read", "read", "forget", "reopen"]):
            case "write":
                generation += 1
                keys = [b"%d of %d" % (rng.randrange(3), slot) for slot in slots]
                blocks = [block(s, k, generation, rng.randbytes(store.block_bytes)) for s, k in zip(slots, keys)]
                assert {result.outcome for result in await store.write(blocks, PATIENCE)} == {"ok"}
                model |= {each.slot: each for each in blocks}
            case "read":
                reads = [empty(model.get(slot) or block(slot, b"none", 0, bytes(store.block_bytes))) for slot in slots]
                if rng.random() < 0.3:
                    reads = [each._replace(generation=each.generation - 1) for each in reads]
                right = {
                    s: each
                    for s, each in model.items()
                    if (each.key, each.generation) in {(read.key, read.generation) for read in reads if read.slot == s}
                }
                assert await outcomes(store, reads) == [
                    "ok" if read.slot in right else "stale" if read.slot in model else "absent" for read in reads
                ]
                assert all(bytes(read.buffer) == bytes(right[read.slot].buffer) for read in reads if read.slot in right)
            case "forget":
                store.forget(slots)
                model = {slot: each for slot, each in model.items() if slot not in slots}
            case _:
                await store.close()
                store = await stores.open()
                slot_of = {(record.key, record.generation): record.slot for record in store.records()}
                model = {slot_of[each.key, each.generation]: each for each in model.values()} if stores.survives else {}
                model = {slot: each._replace(slot=slot) for slot, each in model.items()}
                assert len(slot_of) == len(model)
    await store.close()
