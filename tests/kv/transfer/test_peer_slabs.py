"""Peers' host tiers: what a reader gets is the block it asked for, or a miss, whichever way its bytes come."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from xxhash import xxh3_64_intdigest

from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends import byte_copies
from penstock_kv.transfer.backends.nixl_backend import NixlBackend
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.peer_slabs import BlockPlace, PeerAnswer, PeerSlabs
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.tcp.tcp_stream import TcpStream
from penstock_kv.transfer.transfer_backend import TransferBackend, TransferOrder
from tests.kv.transfer.nixl_setup import needs_nixl

SECRET = ClusterSecret("the secret of this cluster")
BLOCK, STRIDE = 4096, 8192
LISTEN = ("127.0.0.1", 0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Slab:
    """Owner of eight slots, the first six of which have blocks."""

    def __init__(self, block_bytes: int = BLOCK) -> None:
        self.block_bytes = block_bytes
        self.memory = SharedMemory.create(8 * STRIDE)
        self.places: dict[bytes, BlockPlace] = {}
        for slot in range(6):
            self.store(slot, slot, generation=1)

    def store(self, slot: int, number: int, generation: int) -> None:
        for gone in [each for each, place in self.places.items() if place.offset == slot * STRIDE]:
            del self.places[gone]
        self.view(slot)[:] = bytes([number]) * BLOCK
        self.places[key(number)] = BlockPlace(slot * STRIDE, generation, xxh3_64_intdigest(self.view(slot)))

    def view(self, slot: int) -> memoryview:
        return self.memory.array.data[slot * STRIDE : slot * STRIDE + BLOCK]

    def place(self, key: bytes) -> BlockPlace | None:
        return self.places.get(key)


class Peers:
    """An owner and a reader, whose blocks come by one way."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.slab, self.mine = Slab(), Slab()
        self.reader = PeerSlabs("reader", SECRET, self.mine, self.mine.memory, LISTEN, nixl=way == "nixl")

    async def start(self) -> None:
        self.address = await self.begin(1, LISTEN)
        await self.reader.start()
        self.reader.add("owner", self.address)

    async def begin(self, epoch: int, listen: tuple[str, int]) -> tuple[str, int]:
        self.owner = PeerSlabs(
            "owner", SECRET, self.slab, self.slab.memory, listen, epoch=epoch, nixl=self.way == "nixl"
        )
        return await self.owner.start()

    async def ask(self, numbers: Sequence[int]) -> PeerAnswer:
        return await self.reader.ask("owner", [key(number) for number in numbers], 5.0)

    async def read(self, numbers: Sequence[int]) -> tuple[list[str], list[bytes]]:
        for slot in range(len(numbers)):
            self.mine.view(slot)[:] = b"\xff" * BLOCK
        offsets = [slot * STRIDE for slot in range(len(numbers))]
        results = await self.reader.read("owner", [key(number) for number in numbers], offsets, 5.0)
        for slot, result in enumerate(results):
            assert result.outcome != "ok" or result.checksum == xxh3_64_intdigest(self.mine.view(slot))
        return [result.outcome for result in results], [bytes(self.mine.view(slot)[:1]) for slot in range(len(numbers))]


@pytest.fixture(params=["tcp", "shm", "nixl"])
async def peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    moved: list[str] = []
    for kind in (TcpBackend, ShmBackend, NixlBackend):
        note_moves(monkeypatch, kind, moved)
    if request.param == "nixl":
        needs_nixl()
    if request.param != "shm":
        monkeypatch.setattr(ShmBackend, "refusal", lambda *_: "it is on another host")
    peers = Peers(request.param)
    await peers.start()
    yield peers
    await peers.reader.close()
    await peers.owner.close()
    assert set(moved) <= {request.param}


def note_moves(patch: pytest.MonkeyPatch, kind: type[TransferBackend], moved: list[str]) -> None:
    """Note the name of a backend at each of its transfers."""
    move = kind.move

    async def noted(self: TransferBackend, order: TransferOrder) -> None:
        moved.append(kind.name)
        await move(self, order)

    patch.setattr(kind, "move", noted)


async def test_leading_blocks_are_counted_and_read(peers: Peers) -> None:
    assert await peers.ask((2, 3, 4, 77, 5)) == PeerAnswer(3)
    assert await peers.read([4, 2]) == (["ok", "ok"], [b"\4", b"\2"])
    outcomes, _ = await peers.read([4, 5])
    assert outcomes == ["ok", "absent"], "block 5 was behind a gap, and so not in the answer"


async def test_no_keys_and_no_blocks(peers: Peers) -> None:
    assert await peers.ask([]) == PeerAnswer(0)
    assert await peers.ask([50]) == PeerAnswer(0)
    assert await peers.read([]) == ([], [])


async def test_a_slot_that_got_another_block_since_the_answer_is_stale(peers: Peers) -> None:
    await peers.ask(range(6))
    peers.slab.store(3, 60, generation=2)
    assert (await peers.read([2, 3, 4]))[0] == ["ok", "stale", "ok"]
    assert (await peers.read([3]))[0] == ["absent"], "its place is forgotten"


async def test_a_slot_that_gets_another_block_while_it_is_sent_is_stale(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peers.way == "nixl":
        pytest.skip("NIXL's copies can't be met in the middle")
    await peers.ask(range(6))
    send, copy = TcpStream.send_payload, byte_copies.copy_now

    def steal_and_send(stream: TcpStream, payload: memoryview, *, check: bool = True) -> int:
        if payload[0] == 1:
            peers.slab.store(1, 99, generation=2)
        return send(stream, payload, check=check)

    def steal_and_copy(*order: object) -> None:
        peers.slab.store(1, 99, generation=2)
        copy(*order)  # type: ignore[arg-type]

    monkeypatch.setattr(TcpStream, "send_payload", steal_and_send)
    monkeypatch.setattr(byte_copies, "copy_now", steal_and_copy)
    assert (await peers.read([0, 1, 2]))[0] == ["ok", "stale", "ok"]


async def test_a_byte_that_changed_in_the_owners_memory_is_corrupt(peers: Peers) -> None:
    await peers.ask(range(6))
    peers.slab.view(4)[100] ^= 1
    assert (await peers.read([4, 5]))[0] == ["corrupt", "ok"]


async def test_a_peer_restarted_on_the_same_address_is_asked_again(peers: Peers) -> None:
    await peers.ask(range(6))
    assert (await peers.read([0]))[0] == ["ok"]
    await peers.owner.close()
    # The new life has other blocks in the same slots, under the same keys and generations.
    peers.slab.view(0)[:] = b"?" * BLOCK
    await peers.begin(2, peers.address)
    assert (await peers.read([0, 1]))[0] == ["stale", "stale"]
    assert await peers.ask(range(6)) == PeerAnswer(6)
    assert (await peers.read([0, 1]))[0] == ["corrupt", "ok"]


async def test_a_peer_that_is_gone_is_a_miss(peers: Peers) -> None:
    await peers.ask([0])
    await peers.owner.close()
    answer = await peers.ask([0])
    assert answer.blocks == 0
    assert "can't be reached" in answer.cause or "closed" in answer.cause
    assert (await peers.read([0]))[0] == ["failed"]


async def test_a_peer_that_was_forgotten_is_a_miss(peers: Peers) -> None:
    await peers.ask([0])
    peers.reader.remove("owner")
    assert (await peers.read([0]))[0] == ["failed"]
    assert (await peers.ask([0])).blocks == 0
    peers.reader.add("owner", peers.address)
    assert await peers.ask([0]) == PeerAnswer(1)
    assert (await peers.read([0]))[0] == ["ok"]


async def test_blocks_of_another_size_are_none_of_ours(peers: Peers) -> None:
    other = Slab(block_bytes=2 * BLOCK)
    stranger = PeerSlabs("stranger", SECRET, other, other.memory, LISTEN)
    peers.reader.add("stranger", await stranger.start())
    answer = await peers.reader.ask("stranger", [key(0)], 5.0)
    await stranger.close()
    assert answer.blocks == 0 and "8192 bytes, not 4096" in answer.cause


async def test_a_cancelled_read_lets_go_of_its_slots(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    if peers.way == "nixl":
        pytest.skip("NIXL's copies can't be met in the middle")
    await peers.ask(range(6))
    hold, began = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    send = TcpStream.send_payload

    def slow(stream: TcpStream, payload: memoryview, *, check: bool = True) -> int:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(hold.wait(), loop).result()
        return send(stream, payload, check=check)

    async def slow_map(*_: object) -> None:
        began.set()
        await hold.wait()

    monkeypatch.setattr(TcpStream, "send_payload", slow)
    monkeypatch.setattr("penstock_kv.transfer.backends.shm_backend.copy_pieces", slow_map)
    reading = asyncio.create_task(peers.read([1]))
    await began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    hold.set()
    await peers.owner.close()  # every thread that could send has ended
    assert bytes(peers.mine.view(0)) == b"\xff" * BLOCK, "the block came after that"


async def test_shared_memory_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers("shm")
    await peers.start()

    async def fails(*_: object) -> None:
        raise PermissionError("/proc")

    monkeypatch.setattr(ShmBackend, "move", fails)
    await peers.ask(range(6))
    assert (await peers.read([0]))[0] == ["failed"]
    assert (await peers.read([0]))[0] == ["ok"], "over TCP"
    await peers.reader.close()
    await peers.owner.close()


async def test_the_memory_of_a_peer_that_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers("shm")
    await peers.start()
    links: list[object] = []
    link_to = ShmBackend._link

    async def noted(self: ShmBackend, peer: object) -> object:
        links.append(await link_to(self, peer))  # type: ignore[arg-type]
        return links[-1]

    monkeypatch.setattr(ShmBackend, "_link", noted)
    await peers.ask(range(6))
    await peers.read([0])
    (link,) = links
    assert link.mapped  # type: ignore[attr-defined]
    await peers.owner.close()
    await link._task  # type: ignore[attr-defined]
    assert not link.mapped, "a process that is started again needs that memory"  # type: ignore[attr-defined]
    await peers.reader.close()
