"""`PeerSlabs`: blocks of other workers' host slabs, and ours for them, by a `TransferAgent`.

A reader asks over TCP how many leading blocks a peer has, and gets the place of each one in the peer's slab with the
checksum that the owner took when the block was stored. It reads those places by the fastest way that both have: shared
memory within a host, NIXL where it is wanted, TCP. A block counts where the bytes that arrived have that checksum,
so one that gave its slot to another block meanwhile is a miss. A peer that was restarted since the question is
``stale`` for everything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from penstock.kernel.errors import TransferError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends.nixl_backend import NixlBackend
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.descriptors import Descriptor, MemoryRegion
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.storage.block_store import BlockResult, Outcome
from penstock_kv.transfer.tcp.tcp_frames import ITEMS_MAX
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_backend import TransferBackend
from penstock_kv.transfer.transfer_status import TransferRefused, TransferStatus

PLACES_MAX = 1 << 17
"""Places of a peer's blocks that are remembered between a question and the read, some 30 MB."""
TOPIC = "blocks"
SETTLE_SECONDS = 1.0
"""For the question whether a block that did not arrive is still there."""
OUTCOMES: Mapping[TransferStatus, Outcome] = {
    TransferStatus.SUCCESS: "ok",
    TransferStatus.NOT_FOUND: "absent",
    TransferStatus.MISMATCH: "corrupt",
    TransferStatus.LATE: "late",
}
"""What is not here is ``failed``."""


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a block is.

    Args:
        offset: in the slab, bytes.
        generation: of the slot; another one is another block.
        checksum: XXH3-64 of the block as it was when it was stored.
    """

    offset: int
    generation: int
    checksum: int


class BlockQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Where are these blocks? ``leading``: up to the first one that is absent."""

    keys: list[bytes]
    leading: bool


class SlabPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a `BlockQuestion`. ``region``: of the slab, at the agent; a place is None where the block is absent."""

    region: int
    block_bytes: int
    places: list[BlockPlace | None]


class PeerAnswer(NamedTuple):
    """How many leading blocks a peer has. ``cause``: why there is no answer, in words; empty where there is one."""

    blocks: int
    cause: str = ""


class BlockOwner(Protocol):
    """A host slab whose blocks peers may read."""

    block_bytes: int

    def place(self, key: bytes) -> BlockPlace | None:
        """Return where a block is, and None where it is not here. Called from threads, several at a time.

        Before other bytes are written into a slot, its block is no longer returned.
        """
        ...


class _Peer:
    """What we know of one peer. ``plain``: another way than TCP failed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.epoch: int | None = None
        self.slab = SlabPlaces(0, 0, [])
        self.places: dict[bytes, BlockPlace] = {}
        self.plain = False

    def remember(self, keys: Sequence[bytes], places: Sequence[BlockPlace]) -> None:
        for key, place in zip(keys, places):
            self.places.pop(key, None)
            self.places[key] = place
        while len(self.places) > PLACES_MAX:
            del self.places[next(iter(self.places))]


_questions = msgspec.msgpack.Decoder(BlockQuestion)
_answers = msgspec.msgpack.Decoder(SlabPlaces)


class PeerSlabs:
    """One worker's agent; its calls come from one event loop and never raise for a peer.

    Args:
        name: of the worker.
        owner: of the slab, which is in ``memory``.
        listen: where peers reach us; port 0 is any free one.
        nixl: use NIXL where the peer does, too.
        log: takes a line for each connection of a peer that ends by a fault.
    Raises:
        ConfigError: NIXL is wanted and not installed.
    """

    def __init__(
        self,
        name: str,
        secret: ClusterSecret,
        owner: BlockOwner,
        memory: SharedMemory,
        listen: tuple[str, int],
        *,
        nixl: bool = False,
        epoch: int | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._owner = owner
        self._tcp = TcpBackend(
            secret, listen[0], listen[1], advertise=listen[0], answers={TOPIC: self._say_places}, log=log
        )
        backends: list[TransferBackend] = [ShmBackend(), self._tcp]
        if nixl:
            backends.append(NixlBackend())
        self.agent = TransferAgent(name, backends, epoch=epoch)
        self._slab: MemoryRegion = self.agent.register_shared(memory, label="host slab", writable=False)
        self._peers: dict[str, _Peer] = {}

    async def start(self) -> tuple[str, int]:
        """Listen; return the address, which peers need.

        Raises:
            OSError: the address is not ours, or taken.
        """
        await self.agent.start()
        assert self._tcp.address is not None
        return self._tcp.address.host, self._tcp.address.port

    @property
    def known(self) -> dict[str, tuple[str, int]]:
        """Peers and where they listen."""
        return {name: peer.address for name, peer in self._peers.items()}

    def add(self, name: str, address: tuple[str, int]) -> None:
        """Know a peer; another process at its address is refused."""
        self._peers[name] = _Peer(address)

    def remove(self, name: str) -> None:
        """Forget a peer: what is read of it fails, its connections close."""
        peer = self._peers.pop(name)
        if peer.epoch is not None:
            self.agent.remove_remote(name)
        self._tcp.leave(name)

    async def close(self) -> None:
        """End everything; afterwards nothing touches the slab."""
        await self.agent.close()

    async def ask(self, name: str, keys: Sequence[bytes], seconds: float) -> PeerAnswer:
        """Return how many leading blocks of a chain a peer has, of the first `ITEMS_MAX` keys; keep their places."""
        peer = self._peers.get(name)
        if peer is None:
            return PeerAnswer(0, f"there is no peer {name}")
        keys = keys[:ITEMS_MAX]
        try:
            places = [place for place in await self._ask_places(name, peer, keys, True, seconds) if place is not None]
        except (TransferError, msgspec.MsgspecError) as error:
            return PeerAnswer(0, str(error))
        peer.remember(keys, places)
        return PeerAnswer(len(places))

    async def read(self, name: str, keys: Sequence[bytes], offsets: Sequence[int], seconds: float) -> list[BlockResult]:
        """Read blocks that an answer of `ask` had, to these offsets of our slab.

        What is there counts only where a result is ``ok``; the result has the block's checksum then. Once this returns,
        also by cancellation, nothing touches the slab there any more.
        """
        peer = self._peers.get(name)
        if peer is None:
            return [BlockResult("failed", f"there is no peer {name} any more")] * len(keys)
        results = [BlockResult("absent", "the peer did not say that it has this block")] * len(keys)
        known = [position for position, key in enumerate(keys) if key in peer.places]
        if known:
            places = [peer.places[keys[position]] for position in known]
            read = await self._read_places(name, peer, places, [offsets[position] for position in known], seconds)
            wrong = [at for at, result in enumerate(read) if result.outcome in ("corrupt", "failed")]
            if wrong:
                await self._mark_stale_blocks(name, peer, [(keys[known[at]], at) for at in wrong], places, read)
            for position, result in zip(known, read):
                results[position] = result
        for key, result in zip(keys, results):
            if result.outcome in ("absent", "corrupt", "stale"):
                peer.places.pop(key, None)
        return results

    async def _read_places(
        self, name: str, peer: _Peer, places: Sequence[BlockPlace], offsets: Sequence[int], seconds: float
    ) -> list[BlockResult]:
        size, sums = peer.slab.block_bytes, [place.checksum for place in places]
        try:
            handle = self.agent.prepare(
                "read",
                [self._slab.descriptor(offset, size) for offset in offsets],
                [Descriptor(peer.slab.region, place.offset, size) for place in places],
                name,
                deadline=max(seconds, 1e-3),
                checksums=sums,
                backend=self._tcp.name if peer.plain else None,
            )
            handle.post()
        except TransferRefused as error:
            return [BlockResult("failed", error.message)] * len(places)
        await handle.wait_settled()
        results = [BlockResult(OUTCOMES.get(status, "failed"), cause) for status, cause in handle.results()]
        if handle.backend is not self._tcp and any(result.outcome == "failed" for result in results):
            peer.plain = True
        return [
            result._replace(checksum=checksum) if result.outcome == "ok" else result
            for result, checksum in zip(results, sums)
        ]

    async def _mark_stale_blocks(
        self,
        name: str,
        peer: _Peer,
        wrong: Sequence[tuple[bytes, int]],
        places: Sequence[BlockPlace],
        read: list[BlockResult],
    ) -> None:
        """Tell blocks that are no longer where they were from those whose bytes are wrong and those of a lost peer."""
        epoch = peer.epoch
        try:
            now = await self._ask_places(name, peer, [key for key, _ in wrong], False, SETTLE_SECONDS)
        except (TransferError, msgspec.MsgspecError):
            return  # it is gone: that is no news of its blocks
        for (_, at), place in zip(wrong, now):
            if peer.epoch != epoch or place != places[at]:
                read[at] = BlockResult("stale", "the peer has another block there now")

    async def _ask_places(
        self, name: str, peer: _Peer, keys: Sequence[bytes], leading: bool, seconds: float
    ) -> list[BlockPlace | None]:
        body = msgspec.msgpack.encode(BlockQuestion(list(keys), leading))
        answer = await self._tcp.ask(name, peer.address, TOPIC, body, seconds)
        if answer.epoch != peer.epoch:
            await self._meet(name, peer, answer.epoch, seconds)
        slab = _answers.decode(answer.body)
        if len(slab.places) > len(keys) or (not leading and len(slab.places) < len(keys)):
            raise TransferRefused(TransferStatus.INVALID, f"{name!r} answered for other blocks than were asked for")
        if slab.block_bytes != self._owner.block_bytes:
            raise TransferRefused(
                TransferStatus.MISMATCH,
                f"blocks of {name!r} have {slab.block_bytes} bytes, not {self._owner.block_bytes}",
            )
        peer.slab = slab
        return slab.places

    async def _meet(self, name: str, peer: _Peer, epoch: int, seconds: float) -> None:
        """Get to know the life of a peer that answered; what was known of an earlier one is forgotten."""
        metadata = await self._tcp.meet(name, peer.address, seconds)
        if self._peers.get(name) is not peer:
            raise TransferRefused(TransferStatus.NOT_FOUND, f"{name!r} was removed")
        if peer.epoch == epoch:
            return  # another question was quicker
        if peer.epoch is not None:
            self.agent.remove_remote(name)
            peer.epoch = None
        if self.agent.add_remote(metadata).epoch != epoch:
            self.agent.remove_remote(name)
            raise TransferRefused(TransferStatus.MISMATCH, f"{name!r} was restarted just now")
        peer.epoch, peer.places, peer.plain = epoch, {}, False

    def _say_places(self, body: bytes) -> bytes:
        """Answer a peer's question, in a thread of its connection."""
        question = _questions.decode(body)
        places: list[BlockPlace | None] = []
        for key in question.keys:
            place = self._owner.place(key)
            if place is None and question.leading:
                break
            places.append(place)
        return msgspec.msgpack.encode(SlabPlaces(self._slab.id, self._owner.block_bytes, places))
