"""Peers' host tiers: what a reader gets is the block it asked for, or a miss."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from xxhash import xxh3_64_intdigest

from penstock.kernel.secret import ClusterSecret
from penstock.transfer.peer_link import LentBlock, PeerAnswer, PeerIdentity, PeerLink, PeerServer, SlabBlock
from penstock.transfer.tcp.tcp_frames import MoveOutcome

SECRET = ClusterSecret("the secret of this cluster")
BLOCK = 4096


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Slab:
    """Owner of eight slots; ``steal``: gives a slot to another block in the middle of its sending."""

    block_bytes = BLOCK

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(8 * BLOCK))
        self.places: dict[int, tuple[bytes, int]] = {}
        self.sums: dict[int, int] = {}
        self.steal: int | None = None
        for slot in range(6):
            self.store(slot, slot, generation=1)

    def store(self, slot: int, number: int, generation: int) -> None:
        self.view(slot)[:] = bytes([number]) * BLOCK
        self.places[slot] = (key(number), generation)
        self.sums[slot] = xxh3_64_intdigest(self.view(slot))

    def view(self, slot: int) -> memoryview:
        return self.memory[slot * BLOCK : (slot + 1) * BLOCK]

    def leading(self, keys: Sequence[bytes]) -> list[SlabBlock]:
        by_key = {place[0]: (slot, place[1]) for slot, place in self.places.items()}
        blocks = []
        for each in keys:
            if each not in by_key:
                break
            blocks.append(SlabBlock(each, *by_key[each]))
        return blocks

    def lend(self, block: SlabBlock) -> LentBlock | MoveOutcome:
        if self.places.get(block.slot) != (block.key, block.generation):
            return "stale"
        return LentBlock(self.view(block.slot), self.sums[block.slot])

    def returned(self, block: SlabBlock) -> bool:
        if self.steal == block.slot:
            self.store(block.slot, 99, generation=2)
        return self.places.get(block.slot) == (block.key, block.generation)


class Peers:
    def __init__(self) -> None:
        self.slab = Slab()
        self.server = PeerServer(PeerIdentity("owner", 1), SECRET, self.slab)
        self.address = self.server.start("127.0.0.1")
        self.link = PeerLink(self.address, SECRET, PeerIdentity("reader", 1), "owner")

    async def read(self, numbers: Sequence[int]) -> tuple[list[str], list[bytes]]:
        buffers = [memoryview(bytearray(BLOCK)) for _ in numbers]
        results = await self.link.read([key(number) for number in numbers], buffers, 5.0)
        for result, buffer in zip(results, buffers):
            assert result.outcome != "ok" or result.checksum == xxh3_64_intdigest(buffer)
        return [result.outcome for result in results], [bytes(buffer[:1]) for buffer in buffers]


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers()
    yield peers
    await peers.link.close()
    peers.server.close()


async def test_leading_blocks_are_counted_and_read(peers: Peers) -> None:
    assert await peers.link.ask([key(n) for n in (2, 3, 4, 77, 5)], 5.0) == PeerAnswer(3)
    assert await peers.read([4, 2]) == (["ok", "ok"], [b"\4", b"\2"])
    outcomes, _ = await peers.read([4, 5])
    assert outcomes == ["ok", "absent"], "block 5 was behind a gap, and so not in the answer"


async def test_no_keys_and_no_blocks(peers: Peers) -> None:
    assert await peers.link.ask([], 5.0) == PeerAnswer(0)
    assert await peers.link.ask([key(50)], 5.0) == PeerAnswer(0)
    assert await peers.link.read([], [], 5.0) == []


async def test_a_slot_that_got_another_block_since_the_answer_is_stale(peers: Peers) -> None:
    await peers.link.ask([key(n) for n in range(6)], 5.0)
    peers.slab.store(3, 60, generation=2)
    assert (await peers.read([2, 3, 4]))[0] == ["ok", "stale", "ok"]
    assert (await peers.read([3]))[0] == ["absent"], "its place is forgotten"


async def test_a_slot_that_gets_another_block_while_it_is_sent_is_stale(peers: Peers) -> None:
    await peers.link.ask([key(n) for n in range(6)], 5.0)
    peers.slab.steal = 1
    assert (await peers.read([0, 1, 2]))[0] == ["ok", "stale", "ok"]


async def test_a_byte_that_changed_in_the_owners_memory_is_corrupt(peers: Peers) -> None:
    await peers.link.ask([key(n) for n in range(6)], 5.0)
    peers.slab.view(4)[100] ^= 1
    assert (await peers.read([4, 5]))[0] == ["corrupt", "ok"]


async def test_a_peer_restarted_on_the_same_address_is_asked_again(peers: Peers) -> None:
    await peers.link.ask([key(n) for n in range(6)], 5.0)
    assert (await peers.read([0]))[0] == ["ok"]
    peers.server.close()
    # The new life has other blocks in the same slots, under the same keys and generations.
    peers.slab.view(0)[:] = b"?" * BLOCK
    peers.server = PeerServer(PeerIdentity("owner", 2), SECRET, peers.slab)
    peers.server.start(*peers.address)
    assert (await peers.read([0, 1]))[0] == ["stale", "stale"]
    assert await peers.link.ask([key(n) for n in range(6)], 5.0) == PeerAnswer(6)
    assert (await peers.read([0, 1]))[0] == ["corrupt", "ok"]


async def test_a_peer_that_is_gone_is_a_miss(peers: Peers) -> None:
    await peers.link.ask([key(0)], 5.0)
    peers.server.close()
    answer = await peers.link.ask([key(0)], 5.0)
    assert answer.blocks == 0
    assert "can't be reached" in answer.cause or "closed" in answer.cause
    assert (await peers.read([0]))[0] == ["failed"]


async def test_a_cancelled_read_lets_go_of_its_buffers(peers: Peers) -> None:
    await peers.link.ask([key(n) for n in range(6)], 5.0)
    hold = asyncio.Event()
    loop = asyncio.get_running_loop()
    lend = peers.slab.lend

    def slow(block: SlabBlock) -> LentBlock | MoveOutcome:
        asyncio.run_coroutine_threadsafe(hold.wait(), loop).result()
        return lend(block)

    peers.slab.lend = slow  # type: ignore[method-assign]
    buffer = bytearray(BLOCK)
    reading = asyncio.create_task(peers.link.read([key(1)], [memoryview(buffer)], 30.0))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    hold.set()
    await asyncio.sleep(0.05)
    assert buffer == bytes(BLOCK), "the owner sent the block after that"
