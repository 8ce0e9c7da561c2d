"""`BlockSet`: serialised blocks of one agent: their layout, and the registered regions in which they lie.

A worker exports its block sets beside its agent's metadata; a peer imports them, plans copies between them and its own,
and gets the descriptors of both sides.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.message_version import VersionedDecoder
from penstock_kv.transfer.descriptors import Descriptor, MemoryKind, RegionInfo
from penstock_kv.transfer.layouts.block_layout import BlockLayout
from penstock_kv.transfer.layouts.copy_plan import CopyPlan
from penstock_kv.transfer.transfer_status import TransferRefused, TransferStatus, decode_message


class RegionStart(msgspec.Struct, frozen=True, array_like=True):
    """Where an allocation begins within a region."""

    region: int
    offset: int = 0


class DescriptorLists(NamedTuple):
    """Both sides of a plan, for `TransferAgent.prepare`."""

    source: list[Descriptor]
    target: list[Descriptor]


class BlockSet(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that peers may read or write.

    Args:
        id: unique at the agent.
        agent, epoch: whose regions these are.
        kind, device: of the memory; ``device`` counts GPUs.
        starts: of each allocation of the layout, in order.
        digest: of the layout's shape.
    """

    version: int = 1
    id: int
    agent: str
    epoch: int
    layout: BlockLayout
    starts: list[RegionStart]
    kind: MemoryKind = "dram"
    device: int = 0
    digest: str = ""

    def encode(self) -> bytes:
        """Export: the set as MessagePack."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, digest=self.layout.shape.digest))

    def check(self, regions: Mapping[int, RegionInfo]) -> None:
        """Check that every allocation lies within a region of the agent.

        Raises:
            TransferRefused: it does not.
        """
        for start in self.starts:
            region = regions.get(start.region)
            if region is None or region.kind != self.kind:
                raise TransferRefused(
                    TransferStatus.NOT_FOUND, f"{self.agent!r} has no region {start.region} of kind {self.kind}"
                )
            if start.offset < 0 or start.offset + self.layout.allocation_bytes > region.size:
                raise TransferRefused(
                    TransferStatus.INVALID,
                    f"{self.layout.allocation_bytes} bytes at {start.offset} are not within region {region.id}"
                    f" of {region.size} bytes",
                )


_DECODER = VersionedDecoder(BlockSet, "a block set", binary=True)


def import_block_set(data: bytes) -> BlockSet:
    """Read a block set that a peer exported.

    Raises:
        TransferRefused: it is damaged, of a newer version, or contradicts itself.
    """
    blocks: BlockSet = decode_message(_DECODER, data, "a block set")
    if blocks.digest != blocks.layout.shape.digest:
        raise TransferRefused(TransferStatus.MISMATCH, f"the digest of block set {blocks.id} is not that of its shape")
    if len(blocks.starts) != blocks.layout.allocations:
        raise TransferRefused(
            TransferStatus.INVALID,
            f"block set {blocks.id} has {len(blocks.starts)} regions for {blocks.layout.allocations} allocations",
        )
    return blocks


def plan_descriptors(plan: CopyPlan, source: BlockSet, target: BlockSet) -> DescriptorLists:
    """Return a plan's copies as descriptors of the regions of both sets."""
    lengths = plan.length.tolist()
    return DescriptorLists(
        _descriptors_of_pieces(source.starts, plan.source_allocation.tolist(), plan.source_offset.tolist(), lengths),
        _descriptors_of_pieces(target.starts, plan.target_allocation.tolist(), plan.target_offset.tolist(), lengths),
    )


def _descriptors_of_pieces(
    starts: Sequence[RegionStart], allocations: list[int], offsets: list[int], lengths: list[int]
) -> list[Descriptor]:
    return [
        Descriptor(starts[allocation].region, starts[allocation].offset + offset, length)
        for allocation, offset, length in zip(allocations, offsets, lengths)
    ]
