"""`NixlBackend`: carries transfers of memory by NIXL's UCX plug-in, where the package ``nixl`` is installed.

NIXL moves bytes without asking the owner, and says nothing per descriptor. So each transfer first borrows the peer's
regions by a notification: the owner says which ones it still has, and pins them until they are given back or the
lease ends. Each region of a transfer is one NIXL transfer, and so has a result of its own. UCX has no peer
authentication: use it within one trusted network.
"""

import asyncio
import logging
import time
from itertools import count
from typing import NamedTuple

import msgspec

from penstock_kv.transfer.backends.nixl_agent import NixlAgent, load_nixl
from penstock_kv.transfer.descriptors import MemoryRegion
from penstock_kv.transfer.transfer_backend import BackendBase, Capabilities, LocalAgent, RemoteAgent, TransferOrder
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""A peer that is alive answers within milliseconds; NIXL itself does not say that a peer is gone."""
LEASE_SECONDS = 60.0
"""Pins of a borrower that died end after this; the agent's own deadline is shorter."""
LOOK_BUSY, LOOK_IDLE, BUSY_SECONDS = 0.0002, 0.01, 0.5
"""NIXL has no file descriptor to wait for: seconds between two looks for notifications, soon after one and later."""
NOTICE_BYTES_MAX = 32 << 10


class NixlPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of the metadata: the agent's name within NIXL and its own metadata."""

    agent: str
    metadata: bytes


class BorrowRegions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Lend regions for one transfer; answered by `RegionsLent`. ``metadata``: of the borrower, for the answer."""

    id: int
    metadata: bytes
    regions: list[int]


class RegionsLent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Addresses of the regions that are lent; one that is gone is not among them."""

    id: int
    addresses: dict[int, int]


class ReturnRegions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The transfer of a `BorrowRegions` touches its regions no more; not answered."""

    id: int


class NixlNotice(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A notification of an agent; answered by `RegionsLent` without regions."""

    id: int
    metadata: bytes
    name: str
    epoch: int
    payload: bytes


Message = BorrowRegions | RegionsLent | ReturnRegions | NixlNotice
_decoder = msgspec.msgpack.Decoder(Message)


class _Lease(NamedTuple):
    end: float
    regions: list[MemoryRegion]


class NixlBackend(BackendBase):
    """One NIXL agent with the UCX plug-in. Processes that use it are spawned, not forked: UCX hangs after a fork.

    Raises:
        ConfigError: nixl is not installed.
    """

    name = "nixl"
    capabilities = Capabilities(kinds=frozenset({("dram", "dram")}), reach="network", notifications=True, rank=25)

    def __init__(self) -> None:
        load_nixl()
        self._agent: NixlAgent | None = None
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[RegionsLent]] = {}
        self._lent: dict[tuple[str, int], _Lease] = {}
        self._loaded: dict[str, bytes] = {}
        self._task: asyncio.Task[None] | None = None
        self._part = b""

    @property
    def agent(self) -> NixlAgent:
        assert self._agent is not None, "attach comes first"
        return self._agent

    def attach(self, owner: LocalAgent) -> None:
        self._owner = owner
        self._agent = NixlAgent(f"{owner.name}@{owner.epoch}", "UCX")

    async def start(self) -> None:
        self._task = asyncio.create_task(self._listen(), name=f"nixl {self.agent.name}")

    def registered(self, region: MemoryRegion) -> None:
        if region.kind == "dram":
            self.agent.register(region.id, "DRAM", region.bytes_of().ctypes.data, region.info.size, 0)

    def deregistered(self, region: MemoryRegion) -> None:
        if region.kind == "dram":
            self.agent.deregister(region.id)

    def metadata_part(self) -> bytes:
        return msgspec.msgpack.encode(NixlPart(self.agent.name, self.agent.metadata()))

    async def move(self, order: TransferOrder) -> None:
        name = self._load(order.peer)
        by_region = order.by_region()
        id = next(self._ids)
        lent = await self._call(name, BorrowRegions(id, self.agent.metadata(), list(by_region)))
        try:
            for region, positions in by_region.items():
                if region not in lent.addresses:
                    gone = PieceFailed(TransferStatus.NOT_FOUND, f"{order.peer.name!r} has no region {region} any more")
                    for position in positions:
                        order.failed(position, gone)
                elif not order.cancelled:
                    await self._move_region(order, positions, name, lent.addresses[region])
        finally:
            self.agent.send(name, msgspec.msgpack.encode(ReturnRegions(id)))

    async def _move_region(self, order: TransferOrder, positions: list[int], name: str, base: int) -> None:
        pieces = [order.pieces[position] for position in positions]
        here = [(each.local.bytes_of().ctypes.data + each.local_offset, each.length, 0) for each in pieces]
        there = [(base + each.remote_offset, each.length, 0) for each in pieces]
        try:
            await self.agent.move(order.direction, "DRAM", here, "DRAM", there, name)
        except PieceFailed as error:
            for position in positions:
                order.failed(position, error)
        else:
            for position in positions:
                order.succeeded(position)

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        if len(payload) > NOTICE_BYTES_MAX:
            raise PieceFailed(TransferStatus.INVALID, f"a notification of {len(payload)} bytes; {NOTICE_BYTES_MAX} fit")
        name, id = self._load(peer), next(self._ids)
        metadata = self.agent.metadata()
        await self._call(name, NixlNotice(id, metadata, self.owner.name, self.owner.epoch, payload))

    def disconnect(self, peer: RemoteAgent) -> None:
        name = f"{peer.name}@{peer.epoch}"
        if self._loaded.pop(name, None) is not None:
            self.agent.forget(name)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for place in list(self._lent):
            self._return(place)
        for name in list(self._loaded):
            self.agent.forget(name)
        self._loaded.clear()
        self.agent.close()

    def _load(self, peer: RemoteAgent) -> str:
        """Make the peer's newest metadata known to NIXL; return its name there."""
        part = msgspec.msgpack.decode(peer.parts[self.name], type=NixlPart)
        if self._loaded.get(part.agent) != part.metadata:
            self.agent.load(part.metadata)
            self._loaded[part.agent] = part.metadata
        return part.agent

    async def _call(self, name: str, message: BorrowRegions | NixlNotice) -> RegionsLent:
        answer: asyncio.Future[RegionsLent] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = answer
        try:
            self.agent.send(name, msgspec.msgpack.encode(message))
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            raise PieceFailed(
                TransferStatus.DISCONNECTED, f"{name} did not answer within {ANSWER_SECONDS:g} s"
            ) from None
        finally:
            del self._waiting[message.id]

    async def _listen(self) -> None:
        busy_until = 0.0
        while True:
            now = time.monotonic()
            for sender, data in self.agent.notifications():
                busy_until = now + BUSY_SECONDS
                try:
                    self._take(sender, _decoder.decode(data), now)
                except (msgspec.MsgspecError, PieceFailed) as error:
                    log.warning("a notification of %s was dropped: %s", sender, error)
            for place, lease in list(self._lent.items()):
                if lease.end < now:
                    self._return(place)
            await asyncio.sleep(LOOK_BUSY if self._waiting or now < busy_until else LOOK_IDLE)

    def _take(self, sender: str, message: Message, now: float) -> None:
        match message:
            case BorrowRegions(id, metadata, ids):
                regions = [self.owner.regions[each] for each in ids if each in self.owner.regions]
                regions = [each for each in regions if each.kind == "dram"]
                for region in regions:
                    region.pins += 1
                self._lent[sender, id] = _Lease(now + LEASE_SECONDS, regions)
                self._answer(sender, metadata, RegionsLent(id, {r.id: r.bytes_of().ctypes.data for r in regions}))
            case NixlNotice(id, metadata, name, epoch, payload):
                self.owner.deliver(name, epoch, payload)
                self._answer(sender, metadata, RegionsLent(id, {}))
            case ReturnRegions(id):
                self._return((sender, id))
            case RegionsLent(id):
                waiting = self._waiting.get(id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    def _answer(self, sender: str, metadata: bytes, message: RegionsLent) -> None:
        if sender not in self._loaded:
            self.agent.load(metadata)
            self._loaded[sender] = metadata
        try:
            self.agent.send(sender, msgspec.msgpack.encode(message))
        except PieceFailed:
            return  # it is gone; its lease ends by itself

    def _return(self, place: tuple[str, int]) -> None:
        lease = self._lent.pop(place, None)
        for region in lease.regions if lease is not None else ():
            region.pins -= 1
