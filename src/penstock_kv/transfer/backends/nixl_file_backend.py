"""`NixlFileBackend`: reads and writes files of this agent by NIXL's POSIX plug-in, where ``nixl`` is installed."""

from penstock_kv.transfer.backends.nixl_agent import NixlAgent, load_nixl
from penstock_kv.transfer.descriptors import MemoryRegion
from penstock_kv.transfer.transfer_backend import BackendBase, Capabilities, LocalAgent, TransferOrder
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus


class NixlFileBackend(BackendBase):
    """One NIXL agent with the POSIX plug-in. Each file of a transfer is one NIXL transfer, with one result.

    Raises:
        ConfigError: nixl is not installed.
    """

    name = "nixl-file"
    capabilities = Capabilities(kinds=frozenset({("dram", "file")}), reach="storage", notifications=False, rank=40)

    def __init__(self) -> None:
        load_nixl()
        self._agent: NixlAgent | None = None

    @property
    def agent(self) -> NixlAgent:
        assert self._agent is not None, "attach comes first"
        return self._agent

    def attach(self, owner: LocalAgent) -> None:
        self._owner = owner
        self._agent = NixlAgent(f"{owner.name}@{owner.epoch} files", "POSIX")

    def registered(self, region: MemoryRegion) -> None:
        if region.kind == "dram":
            self.agent.register(region.id, "DRAM", region.bytes_of().ctypes.data, region.info.size, 0)
        elif region.kind == "file":
            self.agent.register(region.id, "FILE", 0, region.info.size, region.descriptor_fd)

    def deregistered(self, region: MemoryRegion) -> None:
        self.agent.deregister(region.id, "DRAM" if region.kind == "dram" else "FILE")

    async def move(self, order: TransferOrder) -> None:
        for id, positions in order.by_region().items():
            if order.cancelled:
                return
            file = self.owner.regions.get(id)
            try:
                if file is None:
                    raise PieceFailed(TransferStatus.NOT_FOUND, f"file region {id} was deregistered")
                file.pins += 1
                try:
                    await self._move_file(order, positions, file)
                finally:
                    file.pins -= 1
            except PieceFailed as error:
                for position in positions:
                    order.failed(position, error)

    async def _move_file(self, order: TransferOrder, positions: list[int], file: MemoryRegion) -> None:
        pieces = [order.pieces[position] for position in positions]
        here = [(each.local.bytes_of().ctypes.data + each.local_offset, each.length, 0) for each in pieces]
        there = [(each.remote_offset, each.length, file.descriptor_fd) for each in pieces]
        try:
            await self.agent.move(order.direction, "DRAM", here, "FILE", there, self.agent.name)
        except PieceFailed:
            if len(positions) == 1:
                raise
            # NIXL does not say which descriptor failed: each goes by itself.
            for position in positions:
                try:
                    await self._move_file(order, [position], file)
                except PieceFailed as error:
                    order.failed(position, error)
        else:
            for position in positions:
                order.succeeded(position)

    async def close(self) -> None:
        self.agent.close()
