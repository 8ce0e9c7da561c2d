"""`MemcpyBackend`: copies between agents of one process, also between host and device memory through torch."""

import os
from collections.abc import Sequence
from typing import ClassVar

from penstock_kv.transfer.backends.byte_copies import copy_pieces
from penstock_kv.transfer.descriptors import MemoryRegion, RegionInfo
from penstock_kv.transfer.transfer_backend import BackendBase, Capabilities, LocalAgent, RemoteAgent, TransferOrder
from penstock_kv.transfer.transfer_status import PieceFailed, TransferRefused, TransferStatus

_TOKEN = os.urandom(8).hex()


def _process() -> bytes:
    """Return a name of this process; a fork has another one."""
    return f"{os.getpid()}-{_TOKEN}".encode()


class MemcpyBackend(BackendBase):
    """Finds the peer in a table of the process, and copies."""

    name = "memcpy"
    capabilities = Capabilities(
        kinds=frozenset({("dram", "dram"), ("dram", "vram"), ("vram", "dram"), ("vram", "vram")}),
        reach="process",
        notifications=True,
        rank=0,
    )
    _agents: ClassVar[dict[tuple[str, int], LocalAgent]] = {}

    async def start(self) -> None:
        place = (self.owner.name, self.owner.epoch)
        if place in self._agents:
            raise TransferRefused(TransferStatus.INVALID, f"this process has an agent {place[0]!r} of the same epoch")
        self._agents[place] = self.owner

    def metadata_part(self) -> bytes:
        return _process()

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        if peer.parts[self.name] != _process():
            return "it is in another process"
        return None

    async def move(self, order: TransferOrder) -> None:
        theirs = self._agent(order.peer).regions
        await copy_pieces(order, {piece.remote.id: theirs.get(piece.remote.id) for piece in order.pieces})

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        self._agent(peer).deliver(self.owner.name, self.owner.epoch, payload)

    async def close(self) -> None:
        if self._owner is not None:
            self._agents.pop((self._owner.name, self._owner.epoch), None)

    def _agent(self, peer: RemoteAgent) -> LocalAgent:
        agent = self._agents.get((peer.name, peer.epoch))
        if agent is None:
            raise PieceFailed(TransferStatus.DISCONNECTED, f"{peer.name!r} with epoch {peer.epoch} was closed")
        return agent
