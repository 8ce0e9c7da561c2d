"""`ShmBackend`: copies between processes of one host, through memory that its owner shares.

The owner lends a region for one transfer: a request over a unix socket names regions, the answer says where each one
is mapped from, and until the release or the end of the connection the owner can't deregister them. A peer that was
restarted has another socket, and one of another user is refused.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock_kv.transfer.backends.byte_copies import copy_pieces
from penstock_kv.transfer.descriptors import MemoryRegion, RegionInfo
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_backend import BackendBase, Capabilities, RemoteAgent, TransferOrder
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus

FRAME_BYTES_MAX = 16 << 20
"""A frame names some thousand regions or has one notification; a longer one is a fault."""


class ShmPart(msgspec.Struct, frozen=True):
    """Part of the metadata. ``host``: this boot, user and namespaces; ``shared``: ids of regions that can be mapped."""

    host: str
    address: str
    shared: frozenset[int]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First frame of a connection. ``target``: the epoch that the caller's metadata has."""

    name: str
    epoch: int
    target: int


class Borrow(msgspec.Struct, frozen=True, tag=True):
    """Lend regions for one transfer; answered by places."""

    id: int
    regions: list[int]


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """The transfer of a `Borrow` touches its regions no more; not answered."""

    id: int


class Notify(msgspec.Struct, frozen=True, tag=True):
    """Deliver a notification; answered, so that the caller knows that it arrived."""

    id: int
    payload: bytes


class MappedPlace(msgspec.Struct, frozen=True):
    """Where a region is mapped from; ``inode`` proves that the path still leads to it."""

    path: str
    inode: int


class Reply(msgspec.Struct, frozen=True):
    """To a frame of an id (0: the hello). A region that is gone has no place."""

    id: int
    refusal: str = ""
    places: dict[int, MappedPlace] = {}


Request = Hello | Borrow | GiveBack | Notify
T = TypeVar("T")


def _host_identity() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join(
        (boot, str(os.getuid()), *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")))
    )


async def _read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    if length > FRAME_BYTES_MAX:
        raise ConnectionError(f"a frame of {length} bytes")
    return decoder.decode(await reader.readexactly(length))


def _write_frame(writer: asyncio.StreamWriter, frame: Request | Reply) -> None:
    data = msgspec.msgpack.encode(frame)
    writer.write(struct.pack("<I", len(data)) + data)


_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


class _PeerLink:
    """A connection to a peer, and what is mapped of it. It closes once retired and no transfer borrows."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next = 1
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._borrowed = 0
        self._retired = False
        self.mapped: dict[int, MemoryRegion] = {}
        self.alive = True
        self._task = asyncio.create_task(self._listen())

    async def call(self, frame: Request, id: int) -> Reply:
        """Send a frame and return its reply, or raise ConnectionError once the peer is gone."""
        if not self.alive:
            raise ConnectionError("the connection was closed")
        self._waiting[id] = asyncio.get_running_loop().create_future()
        _write_frame(self._writer, frame)
        return await self._waiting[id]

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def borrow(self) -> None:
        self._borrowed += 1

    def give_back(self, id: int) -> None:
        self._borrowed -= 1
        if not self.alive and not self._borrowed:
            self.mapped.clear()
        if self.alive:
            _write_frame(self._writer, GiveBack(id))
            if self._retired and not self._borrowed:
                self._writer.close()

    def retire(self) -> None:
        self._retired = True
        if not self._borrowed:
            self._writer.close()

    async def _listen(self) -> None:
        error: BaseException = ConnectionError("the peer closed the connection")
        try:
            while True:
                reply = await _read_frame(self._reader, _REPLIES)
                waiting = self._waiting.pop(reply.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (OSError, EOFError, msgspec.MsgspecError) as cause:
            error.__cause__ = cause
        finally:
            self.alive = False
            self._writer.close()
            if not self._borrowed:  # a process that ended needs its memory for the next one
                self.mapped.clear()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)


class ShmBackend(BackendBase):
    """Shares the regions that were registered by `TransferAgent.register_shared`; any dram may be the other end."""

    name = "shm"
    capabilities = Capabilities(kinds=frozenset({("dram", "dram")}), reach="host", notifications=True, rank=10)

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._address = ""
        self._host = _host_identity()
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._links: dict[tuple[str, int], _PeerLink] = {}
        self._connecting: dict[tuple[str, int], asyncio.Lock] = {}

    async def start(self) -> None:
        self._address = f"penstock-transfer-{os.getpid()}-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self._address}")  # abstract: it goes with the process, whatever ends that
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    def metadata_part(self) -> bytes:
        shared = frozenset(id for id, region in self.owner.regions.items() if _is_shared(region))
        return msgspec.msgpack.encode(ShmPart(self._host, self._address, shared))

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        part = msgspec.msgpack.decode(peer.parts[self.name], type=ShmPart)
        if part.host != self._host:
            return "it is on another host, or of another user or in other namespaces of this one"
        private = [str(region.id) for region in remote if region.id not in part.shared]
        return f"regions {', '.join(private)} are not in shared memory" if private else None

    async def move(self, order: TransferOrder) -> None:
        link = await self._link(order.peer)
        id = link.new_id()
        link.borrow()
        try:
            wanted = list({piece.remote.id: piece.remote for piece in order.pieces}.values())
            reply = await link.call(Borrow(id, [info.id for info in wanted]), id)
            await copy_pieces(order, {info.id: self._map_region(link, info, reply) for info in wanted})
        finally:
            link.give_back(id)

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        link = await self._link(peer)
        id = link.new_id()
        await link.call(Notify(id, payload), id)

    def disconnect(self, peer: RemoteAgent) -> None:
        self._connecting.pop((peer.name, peer.epoch), None)
        link = self._links.pop((peer.name, peer.epoch), None)
        if link is not None:
            link.retire()

    async def close(self) -> None:
        for link in self._links.values():
            link.retire()
        self._links.clear()
        if self._server is not None:
            self._server.close()
        for writer in self._serving.values():
            writer.close()  # its task reads the end
        if self._serving:
            await asyncio.wait(list(self._serving))

    def _map_region(self, link: _PeerLink, info: RegionInfo, reply: Reply) -> MemoryRegion | None:
        place = reply.places.get(info.id)
        if place is not None and info.id not in link.mapped:
            shared = SharedMemory.open(place.path)
            status = os.fstat(shared.fileno)
            shared.close()
            if status.st_ino != place.inode or status.st_size < info.size:
                raise PieceFailed(TransferStatus.MISMATCH, f"{place.path} is not the memory of region {info.id}")
            link.mapped[info.id] = MemoryRegion(info, array=shared.array)
        return link.mapped[info.id] if place is not None else None

    async def _link(self, peer: RemoteAgent) -> _PeerLink:
        place = (peer.name, peer.epoch)
        async with self._connecting.setdefault(place, asyncio.Lock()):
            link = self._links.get(place)
            if link is None or not link.alive:
                part = msgspec.msgpack.decode(peer.parts[self.name], type=ShmPart)
                link = _PeerLink(*await asyncio.open_unix_connection(sock=_connected(part.address)))
                try:
                    reply = await link.call(Hello(self.owner.name, self.owner.epoch, peer.epoch), 0)
                    if reply.refusal:
                        raise PieceFailed(TransferStatus.DISCONNECTED, reply.refusal)
                except BaseException:
                    link.retire()
                    raise
                self._links[place] = link
            return link

    # --- what peers ask for -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        lent: dict[int, list[MemoryRegion]] = {}
        try:
            hello = await _read_frame(reader, _REQUESTS)
            refusal = self._greet(hello, writer)
            _write_frame(writer, Reply(0, refusal))
            while isinstance(hello, Hello) and not refusal:
                self._answer(await _read_frame(reader, _REQUESTS), hello, writer, lent)
                await writer.drain()
        except (OSError, EOFError, msgspec.MsgspecError):
            return  # the peer left, or speaks another language; what it borrowed is given back below
        finally:
            for regions in lent.values():
                _unpin_regions(regions)
            writer.close()
            del self._serving[task]

    def _greet(self, hello: Request, writer: asyncio.StreamWriter) -> str:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            return f"user {uid} may not use memory of user {os.getuid()}"
        if not isinstance(hello, Hello) or hello.target != self.owner.epoch:
            return f"{self.owner.name!r} has epoch {self.owner.epoch}: its metadata is of before its restart"
        return ""

    def _answer(
        self, request: Request, hello: Hello, writer: asyncio.StreamWriter, lent: dict[int, list[MemoryRegion]]
    ) -> None:
        match request:
            case Borrow(id, ids):
                known = (self.owner.regions.get(each) for each in ids)
                regions = [each for each in known if each is not None and _is_shared(each)]
                for region in regions:
                    region.pins += 1
                lent[id] = regions
                places = {each.id: MappedPlace(each.path, os.fstat(each.descriptor_fd).st_ino) for each in regions}
                _write_frame(writer, Reply(id, places=places))
            case GiveBack(id):
                _unpin_regions(lent.pop(id, []))
            case Notify(id, payload):
                self.owner.deliver(hello.name, hello.epoch, payload)
                _write_frame(writer, Reply(id))
            case Hello():
                raise ConnectionError("a second hello")


def _connected(address: str) -> socket.socket:
    """Connect to an abstract address, which is done at once; uvloop can't do that by itself."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(f"\0{address}")
    except OSError:
        connection.close()
        raise
    return connection


def _is_shared(region: MemoryRegion) -> bool:
    return region.kind == "dram" and region.path != ""


def _unpin_regions(regions: list[MemoryRegion]) -> None:
    for region in regions:
        region.pins -= 1
